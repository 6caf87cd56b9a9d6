"""The page of a cleaning in a browser: sentences and suspects first, and no curve of two points."""

import json

import numpy as np
import pytest

from fedbilevel.cleaning.client_labels import transition_finding
from fedbilevel.report import write_report
from support.browser.pages import NEEDS_BROWSER
from support.browser.records import HOSTILE, rows_of, write_run

pytestmark = [NEEDS_BROWSER, pytest.mark.wait]
SHOWN = "[...document.querySelectorAll('main > section:not([hidden])')].map(e => e.id)"


def cleaned(folder, *sentences):
    write_run(folder, "label_em", rows=rows_of(0, 2))
    (folder / "cleaning.json").write_text(json.dumps({"verdict": "accepted", "sentences": sentences}))
    return folder


def test_sentences_and_suspects_come_first(opened, tmp_path):
    folder = cleaned(tmp_path / "run", "40 labels are flagged.", HOSTILE)
    page = opened(write_report(folder, tmp_path / "page.html"))
    said = page.run("[...document.querySelectorAll('#verdict p')].map(e => e.textContent)")
    assert said == ["40 labels are flagged.", HOSTILE]
    shown = page.run(SHOWN)
    assert shown[0] == "findings"
    assert "finals" in shown
    assert not {"curves", "target", "headline"} & {*shown}


def test_the_transition_matrix_is_a_table_with_darker_grounds_for_more_mistakes(opened, tmp_path):
    folder = cleaned(tmp_path / "run", "40 labels are flagged.")
    transition = np.array([[0.9, 0.1, 0.0], [0.0, 1.0, 0.0], [0.05, 0.0, 0.95]])
    shown = transition_finding(transition, ["cat", HOSTILE, "emu"])
    (folder / "findings.json").write_text(json.dumps([shown]))
    page = opened(write_report(folder, tmp_path / "page.html"))
    cells = page.run(
        "[...document.querySelectorAll('.finding tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert cells[0] == ["cat", "90.0 %", "10.0 %", "0.0 %"]
    assert cells[1][0] == HOSTILE
    share = "[...document.querySelectorAll('td.share')].map(c => c.style.getPropertyValue('--share'))"
    assert page.run(share) == ["60%", "0%", "0%", "0%", "30%", "0%"]


def test_a_cleaning_beside_another_run_is_a_run_like_any(opened, tmp_path):
    cleaned(tmp_path / "runs" / "cleaned", "40 labels are flagged.")
    write_run(tmp_path / "runs" / "other", "fedbio")
    page = opened(write_report(tmp_path / "runs", tmp_path / "page.html"))
    assert page.run(SHOWN)[:2] == ["headline", "curves"]
    assert "40 labels" not in page.run("document.getElementById('verdict').textContent")
