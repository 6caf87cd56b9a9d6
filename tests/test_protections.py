"""Tables of leakage and protections come from recorded experiments, and pages say what they say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fedbilevel.studies import leaks
from fedbilevel.studies.experiment import read
from website import protections

DOCS = Path(__file__).resolve().parents[1] / "docs"


def with_result(name, result):
    one = read(name)
    entries = {
        panel: {
            row: {"repetitions": 2, "figures": {key: {"mean": value} for key, value in figures.items()}}
            for row, figures in rows.items()
        }
        for panel, rows in result.items()
    }
    return dataclasses.replace(one, content={**one.content, "result": entries})


def test_tables_have_the_recorded_means():
    figures = {"psnr": 41.6, "recovered_train": 0.5, "recovered_val": 1.0}
    one = with_result(
        "leakage",
        {"cleaning-fedbio": {"four": figures}, "cleaning-fedavg": {"one": {"psnr": 99.6, "recovered_train": 1.0}}},
    )
    assert "| batch 4 | 42 dB (50 %, 100 %) |" in protections.by_protection(one)
    assert "| `fedavg` | y | none | 100 dB (100 %) | - | - |" in protections.by_algorithm(one)


def test_messages_are_named_for_every_algorithm_that_is_inverted():
    assert set(protections.MESSAGES) == set(leaks._CARRIERS)


@pytest.mark.parametrize(
    ("gap", "share", "word"), [(-0.002, 0.09, "met"), (-0.002, 0.2, "not met"), (-0.01, 0.09, "not met")]
)
def test_a_goal_is_met_by_means_over_repetitions(monkeypatch, gap, share, word):
    row = {"accuracy": 0.91, "gap": gap, "bytes": share}
    one = with_result("protection-bytes", {"cleaning": {"fedbio-topk": row}})
    empty = dataclasses.replace(one, content={**one.content, "result": {}})
    monkeypatch.setattr(protections, "experiment", lambda name: one if name == "protection-bytes" else empty)
    line = f"| label cleaning | FedBiO, largest 4.9 % | 91.0 % | {100 * gap:+.1f} | {100 * share:.1f} % | {word} | 2 |"
    assert protections.goals().splitlines()[2:] == [line]


def test_a_robust_row_names_its_rule():
    one = read("attackers-cleaning")
    content = {
        **one.content,
        "tuned": {"all": {"fedbio-robust": {"settings": {"aggregation": {"robust": "median", "outside": 0.2}}}}},
    }
    own = dataclasses.replace(one, content=content)
    title = "FedBiO, robust (median after means of nearest rows without 20%)"
    assert protections._row_title(own, "ten", "fedbio-robust") == title
    assert protections._row_title(own, "ten", "fedbio-mean") == "FedBiO, mean"


@pytest.mark.parametrize("comment", protections.TABLES)
def test_every_table_is_on_a_page(comment):
    pages = [path for path in DOCS.rglob("*.md") if comment in path.read_text()]
    assert len(pages) == 1
    assert protections.filled(f"a\n\n{comment}\n") == f"a\n\n{protections.TABLES[comment]()}\n"
    assert protections.filled("a") == "a"


def test_what_the_page_on_privacy_says_about_leakage():
    one = read("leakage")
    result = one.content["result"]
    means = {panel: {row: protections.recorded(one, panel, row) for row in rows} for panel, rows in result.items()}
    assert all(entry["repetitions"] >= 5 for rows in result.values() for entry in rows.values())
    assert len(means) == 12
    for panel, rows in means.items():
        large = panel == "representation-mnist-fedbio"
        for row in {"one", "clip", "int8", "topk"} & set(rows):
            least = 0.9 if panel == "cleaning-penalty" else 1.0  # y and d are clipped apart
            assert (rows[row]["recovered_train"] >= least) != large, (panel, row)
            assert rows[row].get("recovered_val", 1) >= least, (panel, row)
        for row in {"one", "four", "sixteen", "all", "clip", "int8", "topk", "secure", "secure16"} & set(rows):
            assert min(rows[row]["labels_train"], rows[row].get("labels_val", 1)) > 0.98, (panel, row)
        assert rows["secure"].get("recovered_val", 1) > 0.3
        if "secure16" in rows:
            assert rows["secure16"]["recovered_train"] < 0.01
            assert abs(rows["secure16"]["psnr"] - rows["labels-alone"]["psnr"]) < 1.5
            assert rows["noise1"]["psnr"] < rows["labels-alone"]["psnr"] - 5 < rows["noise01"]["psnr"]
        if panel.startswith("cleaning-"):
            assert rows["one"]["psnr"] > 99
    local = {panel: rows["local"]["psnr"] - rows["four"]["psnr"] for panel, rows in means.items() if "local" in rows}
    assert local.pop("cleaning-aggitd") == 0
    assert max(local.values()) < -20


def test_what_the_page_on_the_layer_says_about_compression():
    one = read("protection-bytes")
    for panel in ("cleaning", "representation"):
        for row in one.content["rows"]:
            figures, (name, kind) = protections.recorded(one, panel, row), row.split("-")
            met = protections.is_met(one.settings(panel, row)["goal"], figures)
            if kind == "topk":
                assert met == ((panel, name) != ("representation", "aggitd")), (panel, row)
            if kind == "int8":
                assert abs(figures["gap"]) < 0.002
                assert 0.25 < figures["bytes"] < 0.26
            if name == "aggitd" and kind in ("randk", "powersgd"):
                assert figures["gap"] < -0.1


@pytest.mark.parametrize("name", ["attackers-cleaning", "attackers-representation"])
def test_what_the_page_on_the_layer_says_about_robust_means(name):
    one = read(name)
    for panel in protections.GOALS[name]:
        for row in one.content["rows"]:
            figures = protections.recorded(one, panel, row)
            if figures and row.endswith("-robust"):
                assert abs(figures["beside_20"]) < 0.005, (panel, row)
                assert figures["gap"] < -0.03 or panel == "mnist" or name == "attackers-representation", (panel, row)
            elif figures:
                assert figures["gap_20"] < -0.28, (panel, row)
            if figures and panel == "ten" and row.endswith("-robust"):
                assert figures["without_20"] < figures["clean"] - 0.1
    share = {
        (panel, row): protections.recorded(one, panel, row)
        for panel in one.content["panels"]
        for row in one.content["rows"]
    }
    assert share["sign-flip", "fedbio-robust"]["mean_20"] > 0.9
    names = [row.removesuffix("-mean") for row in one.content["rows"] if row.endswith("-mean")]
    assert len(names) == 4
    for algorithm in names:
        assert share["sign-flip", f"{algorithm}-robust"]["mean_30"] < 0.35
    if name == "attackers-cleaning":
        better = {
            (algorithm, panel, label)
            for algorithm in names
            for panel in ("inner-product", "label-flip")
            for label in ("mean_10", "mean_20", "mean_30", "mean_40")
            if share[panel, f"{algorithm}-robust"][label] > share[panel, f"{algorithm}-mean"][label]
        }
        assert better == {("adasimfbo", "label-flip", "mean_20")}
