"""The tutorial docs/three-hospitals.md, run as written: its files are made, its commands are typed,
and their output is what it quotes."""

import csv
import json
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

import numpy as np
from safetensors.torch import load_file

from fedbilevel.sites.flare.local import free_port
from support.docs import NUMBER, PATIENCE, ROUNDING, Block, Terminal, blocks, check_quoted, commands
from support.sites.reaper import processes_of, reaped

pytestmark = [pytest.mark.wait, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "three-hospitals.md"
PORT = "port = 8002"
SITES = {"north": 459, "south": 345, "west": 344}  # how many notes each has


def until_connected(folder):
    """Wait for the sites in the server's log, because a command that asks for them takes seconds
    itself."""
    end, log = time.monotonic() + PATIENCE, folder / "kits/server/log.txt"
    while not all(f"New client {site}@" in _text(log) for site in SITES):
        assert time.monotonic() < end, f"the sites are not connected:\n{_text(log)}"
        time.sleep(0.2)


def _text(path):
    return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The page from its first block to its last: the output of every command, and the folder in
    which they ran."""
    folder = tmp_path_factory.mktemp("hospitals")
    with reaped(folder):
        yield from _played(folder)


def _played(folder):
    terminal, said, page = Terminal(folder, commands(folder)), {}, blocks(PAGE.read_text())
    try:
        for block, after in zip(page, [*page[1:], Block("", "", "")], strict=True):
            quoted = after.text if after.language == "text" else ""
            if block.file:
                (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.file).write_text(block.text.replace(PORT, f"port = {free_port()}"))
            elif block.language == "bash":
                command = block.text.strip()
                if terminal.running:
                    until_connected(folder)
                said[command] = terminal.type(command)
                check_quoted(quoted, said[command])
        yield said, folder
    finally:
        terminal.close()
    assert [one.returncode for one in terminal.running] == [0] * 5, terminal.screens()
    assert processes_of(folder) == []


def test_the_page_quotes_the_output_of_its_commands(played):
    """The fixture compares. Here: it had something to compare, and all of it ran on loopback."""
    _, folder = played
    page = PAGE.read_text()
    kinds = [(block.language, bool(block.file)) for block in blocks(page)]
    assert kinds.count(("text", False)) == 15
    assert (
        kinds.count(("bash", False)) == kinds.count(("text", False)) + 3
    )  # what runs in the background, and two that say what a third one says
    assert {kind for kind in kinds if kind[0] != "text"} == {("bash", False), ("python", True), ("toml", True)}
    assert page.count("```") == 2 * len(kinds)  # none was overlooked
    assert PORT in page
    assert PORT not in (folder / "federation.toml").read_text()


def test_the_lead_sees_the_accuracy_and_the_verdict_of_the_record_and_of_the_simulator(played):
    said, folder = played
    last = json.loads((folder / "kits/server/runs/cleaning/metrics.jsonl").read_text().splitlines()[-1])
    assert (last["iteration"], last["num_sites"]) == (51, 3)
    submitted = (folder / "terminal-4.txt").read_text()  # the lead's
    assert f"test_accuracy {last['test_accuracy']:.4g}," in submitted.splitlines()[-3]
    served = json.loads((folder / "kits/server/runs/cleaning/cleaning.json").read_text())
    assert served["verdict"] == "accepted"
    assert submitted.splitlines()[-2] == served["sentences"][0] == said["python simulate.py"].splitlines()[0]
    assert not {"precision", "recall", "f1"} & last.keys()  # no hospital knows which labels are wrong
    *_, difference = NUMBER.findall(said["python simulate.py"].splitlines()[-1])
    assert float(difference) <= ROUNDING


def test_nothing_left_before_the_hospital_approved_and_its_screen_reports_the_run(played):
    _, folder = played
    for number, hospital in enumerate(SITES, start=1):
        kit = folder / "kits" / hospital / "site"
        [decided] = json.loads((kit / "approvals.json").read_text()).values()
        first = json.loads((kit / "left.jsonl").read_text().splitlines()[0])
        assert (decided["decision"], decided["how"]) == ("approved", "operator")
        assert decided["time"] < first["time"]
        screen = (folder / f"terminal-{number}.txt").read_text()
        assert re.search(
            r"cleaning, sent by lead@north.example, waits for your approval: .*\n(.*\n)*.*cleaning: begins.*\n"
            r"(.*\n)*cleaning: finished.*\ncleaning: \d+ of \d+ labels are flagged as wrong",
            screen,
        )
    assert (
        "waiting for the operator of north, south, west: the plan is not approved there yet"
        in (folder / "terminal-4.txt").read_text()
    )


def test_suspects_are_at_their_hospital_alone(played):
    _, folder = played
    for hospital, size in SITES.items():
        place = folder / f"kits/{hospital}/site/runs/cleaning"
        own = load_file(place / "solution.safetensors")
        assert {name: tuple(value.shape) for name, value in own.items()} == {"x.logit": (10 * size,)}
        rows = list(csv.DictReader((place / "suspects.csv").read_text().splitlines()))
        flagged = {int(row["sample"]) for row in rows if row["flagged"] == "1"}
        wrong = {*np.load(folder / f"truth-{hospital}.npy").nonzero()[0].tolist()}
        assert len(rows) == size
        assert len(flagged & wrong) > 0.95 * max(len(flagged), len(wrong))
        lines = [json.loads(line) for line in (folder / f"kits/{hospital}/site/left.jsonl").read_text().splitlines()]
        sizes = {array["shape"][-1] for line in lines for array in line["arrays"]}
        assert len(sizes) > 10
        assert not sizes & {size, 10 * size}  # none has a number for each sample
    server = folder / "kits/server"
    assert not [
        place for kit in ("server", "lead@north.example") for place in (folder / "kits" / kit).rglob("*suspects*")
    ]
    assert {
        name: tuple(value.shape) for name, value in load_file(server / "runs/cleaning/solution.safetensors").items()
    } == {"y.weight": (432, 10), "y.bias": (10,)}


@pytest.mark.parametrize(
    ("quoted", "said"),
    [
        ("accuracy 0.8864", "accuracy 0.8664"),
        ("7 rounds", "8 rounds"),
        ("a\nb", "a"),
        ("a\nb", "a\nc\nb"),
        ("...\nb", "a\nc"),
        ("difference 0.0e+00", "difference 1.0e-04"),
        ("128 of 459 notes are suspicious", "120 of 459 notes are suspicious"),
        ("north 0.2 s", "south 0.2 s"),
    ],
)
def test_a_wrong_quotation_is_detected(quoted, said):
    with pytest.raises(AssertionError, match="the page quotes"):
        check_quoted(quoted, said)


def test_a_quotation_that_differs_in_clocks_and_rounding_is_accepted():
    check_quoted("a 0.21 s\n...\naccuracy 0.8864, 1.0e-06\n", "a 7.99 s\nb\nc\naccuracy 0.8871, 2.0e-06\nand more\n")
