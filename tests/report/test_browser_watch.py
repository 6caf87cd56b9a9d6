"""The page of a running run in a headless Chromium."""

import contextlib
import json
import os
import threading
import time

import pytest

from fedbilevel.report.watch import Live, Watch
from support.browser.pages import NEEDS_BROWSER, against, traces
from support.browser.records import (
    rows_of,
    write_run,
)

pytestmark = [NEEDS_BROWSER, pytest.mark.wait]


@contextlib.contextmanager
def serving(folder):
    with Watch(Live([folder])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_watch_redraws_and_keeps_the_switches(chromium, tmp_path):
    folder = write_run(tmp_path / "run", iterations=35, rows=rows_of(0))
    with serving(folder) as server:
        page = chromium.page().open(server.address)
        assert "outer iteration 25 of 35" in page.run("document.getElementById('status').textContent")
        page.press("#axis input[value=calls]")
        page.choose("metric", "f1")
        page.choose("log", True)
        page.choose("target-value", "0.25")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows_of(0, 8)[6:]))
        page.until("document.getElementById('status').textContent === 'The run has finished.'", 10)
        [line] = traces(page, "curves-plot", part="mean")
        assert (line["x"], line["y"]) == (against(rows_of(0, 8), "calls"), [row["f1"] for row in rows_of(0, 8)])
        values = "[...document.querySelectorAll('#axis input:checked, #metric, #target-value')].map(e => e.value)"
        assert page.run(f"[...{values}, document.getElementById('log').checked]") == ["f1", "calls", "0.25", True]
        assert page.complaints == []
        assert set(page.requests) == {server.address, f"{server.address}data.json"}
        page.close()


@pytest.mark.slow
def test_watch_shows_a_run_before_its_first_measurement_and_says_when_it_is_gone(chromium, tmp_path):
    folder = write_run(tmp_path / "run", rows=[], whole=False)
    with serving(folder) as server:
        page = chromium.page().open(server.address)
        assert "No measurement yet" in page.run("document.getElementById('status').textContent")
        assert page.complaints == []
    page.until(
        "document.getElementById('status').textContent.startsWith('The connection to fedbilevel watch is lost')", 10
    )
    page.close()


def test_watch_says_since_when_nothing_new_has_come(chromium, tmp_path):
    folder = write_run(tmp_path / "run", iterations=35, rows=rows_of(0))
    for name in ("config.json", "metrics.jsonl", "ledger.json"):
        os.utime(folder / name, (time.time() - 605,) * 2)
    with serving(folder) as server:
        page = chromium.page().open(server.address)
        text = "document.getElementById('status').textContent"
        assert (
            f" Nothing new for 10 min: it computes, or its process has ended (then: fedbilevel resume {folder})."
            in page.run(text)
        )
        os.utime(folder / "ledger.json")  # another checkpoint
        page.until(f"!{text}.includes('Nothing new')", 10)
        assert "outer iteration 25 of 35" in page.run(text)
        assert page.complaints == []
        page.close()


def test_watch_judges_every_run_by_itself_and_advises_what_can_be_done(chromium, tmp_path):
    for name, config in {"alive": {}, "dead": {}, "site": {"engine": "federation"}, "python": {"task": None}}.items():
        folder = write_run(tmp_path / "runs" / name, name, iterations=35, whole=False)
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**told, **config}))
        if name != "alive":
            for file in ("config.json", "metrics.jsonl"):
                os.utime(folder / file, (time.time() - 305,) * 2)
    with serving(tmp_path / "runs") as server:
        page = chromium.page().open(server.address)
        said = page.run("document.getElementById('status').textContent")
        assert said.count("Nothing new") == 3
        assert "from alive" not in said
        heads = page.run("[...document.querySelectorAll('.card h3')].map(e => e.textContent)")
        names = {name: next(head for head in heads if name in head) for name in ("dead", "site", "python")}
        end = "for 5 min: it computes, or its process has ended"
        assert f"Nothing new from {names['dead']} {end} (then: fedbilevel resume {tmp_path / 'runs' / 'dead'})." in said
        for name in ("site", "python"):
            assert f"Nothing new from {names[name]} {end}." in said
        assert page.complaints == []
        page.close()


@pytest.mark.slow
def test_watch_shows_that_a_run_failed(chromium, tmp_path):
    folder = write_run(tmp_path / "run", iterations=35)
    with serving(folder) as server:
        page = chromium.page().open(server.address)
        assert (
            page.run("document.querySelector('.card .of').textContent") == "last test accuracy"
        )  # there may be a later one
        (folder / "end.json").write_text(
            json.dumps({"stopped": "failed", "iteration": 28, "why": "a step was too long."})
        )
        page.until(
            "document.getElementById('status').textContent === 'Failed after outer iteration 28 of 35: a "
            "step was too long.'",
            10,
        )
        assert page.complaints == []
        page.close()
