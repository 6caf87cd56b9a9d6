"""What is said of recorded results is what they say."""

import collections
import json
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedbilevel import cli, experiment, report, reproduce

RESULTS = Path(__file__).resolve().parent.parent / "experiments"
NAMES = sorted(path.parent.name for path in RESULTS.glob("*/experiment.toml"))


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_runs_in_small(name, tmp_path):
    one = experiment.read(RESULTS / name)
    jobs = one.jobs(quick=True)
    found = reproduce.reproduce(jobs, tmp_path)
    assert len(found) == len(jobs) > 0
    for job, content in found:
        assert "diverged" not in content["figures"], job.key
        assert set(one.figures) & set(content["figures"]), job.key
    assert reproduce.draw(one, found, tmp_path) or "plot" not in one.content
    assert len(report.reproduction(one, reproduce.summary(found))) == len({job.panel for job in jobs})


@pytest.mark.parametrize("name", NAMES)
def test_what_is_recorded_belongs_to_rows_that_exist_and_says_where_it_comes_from(name):
    one = experiment.read(RESULTS / name)
    places = set(one.places())
    for panel, rows in one.content.get("result", {}).items():
        for row, entry in rows.items():
            assert (panel, row) in places
            assert entry["repetitions"] >= 1
            assert entry["commit"] not in ("", "unknown")
            assert entry["machine"]


def test_the_page_of_results_is_what_the_files_hold():
    printed = CliRunner().invoke(cli.cli, ["reproduce", "--results"])
    assert printed.exit_code == 0
    assert (RESULTS / "RESULTS.md").read_text() == printed.output


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
