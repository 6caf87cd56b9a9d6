"""What is said of recorded results is what they say."""

import collections
import json
import statistics
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parent.parent / "experiments"


@pytest.mark.parametrize("name", ["mnist-mlp-cuda", "digits-mlp-cpu"])
def test_masks_learned_by_hgp_beat_training_alone_and_plain_gradient_push_on_every_network(name):
    outcomes = json.loads((RESULTS / "hgp-table2" / f"{name}.json").read_text())["outcomes"]
    figures = collections.defaultdict(list)
    for one in outcomes:
        figures[one["network"], one["method"]].append((one["test_accuracy"], one["bottom_decile"]))
    means = {key: tuple(map(statistics.fmean, zip(*values, strict=True))) for key, values in figures.items()}
    networks = {network for network, _ in means}
    assert networks == {"complete", "erdos_renyi", "random_undirected", "random_directed"}
    for network in networks:
        for other in ("local", "sgp"):
            assert all(ours > theirs for ours, theirs in zip(means[network, "hgp_pl"], means[network, other], strict=True)), (network, other)


def test_influence_of_logistic_regression_is_that_of_the_paper():
    saved = json.loads((RESULTS / "hgp-table4" / "mixture-logistic.json").read_text())
    assert saved["method"] == "hgp"
    assert saved["num_removed"] == 50
    assert saved["scores"]["r2"] >= 0.99
    assert saved["scores"]["f1"] == 1.0
