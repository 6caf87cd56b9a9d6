"""The demo: the figures that it prints are those of the cleaning and of the truth, and its files are there."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

import fedbilevel as fb
from fedbilevel.cli.main import cli
from support.browser.pages import elements


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What the demo prints, and the folder that it writes."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    done = CliRunner().invoke(cli, ["demo", "--out", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output, folder


@pytest.fixture(scope="module")
def again():
    """The same clients, and the same cleaning in Python."""
    clients = fb.tasks.DataCleaning(noise=0.2).build().clients
    return clients, fb.clean_labels(clients, features="convolutional")


def percentages(pattern, text):
    [found] = re.findall(pattern, text)
    return [float(one) for one in found]


def test_it_says_what_it_does_and_how_to_go_on(demo, again):
    said, folder = demo
    num = sum(len(client["train"]["label"]) for client in again[0])
    assert said.startswith(f"10 clients hold {num:,} handwritten digits, and 20% of the labels were replaced")
    assert "they send sums, and keep images, labels and suspects" in said
    assert f"pictures in {folder / 'report.html'}" in said
    assert said.rstrip().endswith("fedbilevel clean FOLDER")


def test_printed_precision_and_recall_are_those_of_the_flags_and_the_truth(demo, again):
    clients, found = again
    wrong, flags = np.concatenate([client["train"]["wrong"] for client in clients]), np.concatenate(found.flags)
    precision, recall = percentages(r"precision ([\d.]+)%.*recall ([\d.]+)%", demo[0])
    assert precision == pytest.approx(100 * wrong[flags].mean(), abs=0.051)
    assert recall == pytest.approx(100 * flags[wrong].mean(), abs=0.051)
    assert found.truth.precision == pytest.approx(wrong[flags].mean())
    assert found.truth.recall == pytest.approx(flags[wrong].mean())
    both = found.truth.precision, found.truth.recall
    assert found.truth.f1 == pytest.approx(2 * both[0] * both[1] / sum(both))


def test_printed_shares_of_wrong_labels_are_the_estimated_and_the_true_ones(demo, again):
    clients, found = again
    rows = re.findall(r"^ (client-\d) +\d+ +([\d.]+)% +([\d.]+)% ", demo[0], re.MULTILINE)
    assert [name for name, *_ in rows] == list(found.names)
    for (name, estimated, true), client in zip(rows, clients, strict=True):
        assert float(estimated) == pytest.approx(100 * found.noise[name], abs=0.051)
        assert float(true) == pytest.approx(100 * client["train"]["wrong"].mean(), abs=0.051)


def test_printed_accuracies_are_those_of_both_classifiers_on_test_images(demo, again):
    clients, found = again
    image, label = (np.concatenate([client["test"][name] for client in clients]) for name in ("image", "label"))
    cleaned, plain = percentages(r"cleaned labels is right in ([\d.]+)%.*given labels in ([\d.]+)%", demo[0])
    assert found.verdict == "accepted"
    assert cleaned == pytest.approx(100 * (found.predict(image) == label).mean(), abs=0.051)
    model = found.classifiers["plain"]
    right = ((found.rows(image) @ model["weight"] + model["bias"]).argmax(1) == label).mean()
    assert plain == pytest.approx(100 * right, abs=0.051)
    assert f"On {len(label)} test samples" in demo[0]
    assert cleaned > plain


def test_the_verdict_has_its_interval(demo, again):
    low, high = again[1].interval
    assert "the cleaning is accepted" in demo[0]
    assert f"95 % interval {100 * low:+.1f} to {100 * high:+.1f}" in demo[0]


def test_suspects_have_a_file_per_client_and_pictures_in_the_report(demo, again):
    said, folder = demo
    found = again[1]
    files = sorted((folder / "suspects").glob("*.csv"))
    assert [place.stem for place in files] == sorted(found.names)
    rows = [row for place in files for row in csv.DictReader(place.read_text().splitlines())]
    assert len(rows) == sum(map(len, found.labels))
    assert said.count(" of 1,148 labels are flagged") == 1
    assert f"{sum(int(row['flagged']) for row in rows)} of 1,148 labels are flagged" in said
    [run] = json.loads(elements((folder / "report.html").read_text()).scripts[0])["runs"]
    assert (run["cleaning"]["verdict"], run["cleaning"]["sentences"]) == ("accepted", found.sentences)
    assert run["cleaning"]["transition"] == found.transition.tolist()
    pictures, shares = run["findings"][:2]
    assert [(item["facts"]["held by"], item["facts"]["suggested"]) for item in pictures["items"]] == [
        (one.client, one.suggested) for one in found.suspects(len(pictures["items"]))
    ]
    assert all(item["facts"]["really wrong"] for item in pictures["items"][:5])
    assert shares["values"]["estimated share"] == pytest.approx(list(found.noise.values()))
    assert shares["values"]["true share"] == pytest.approx(list(found.truth.noise.values()))
