"""The tutorial docs/three-laptops.md, run as it is written."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'fedbilevel[peers]'")

from fedbilevel.peers.local import free_ports
from support.docs import PATIENCE, Block, Terminal, blocks, check_quoted, commands

pytestmark = [pytest.mark.wait, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "three-laptops.md"
PORTS = ("5551", "5552", "5553")
NAMES = ("ann", "bob", "eve")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Run all blocks of the page with free ports. Gives the output of every command, and the folder."""
    folder = tmp_path_factory.mktemp("laptops")
    page = PAGE.read_text()
    for port, free in zip(PORTS, free_ports(3), strict=True):
        page = page.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
    terminal, said, found = Terminal(folder, commands(folder)), {}, blocks(page)
    try:
        for block, after in zip(found, [*found[1:], Block("", "", "")], strict=True):
            if block.file:
                (folder / block.file).write_text(block.text)
            elif block.language == "bash":
                command = block.text.strip()
                said[command] = terminal.type(command)
                if command.endswith("&"):  # the three peers run in the background
                    assert [one.wait(PATIENCE) for one in terminal.running] == [0, 0, 0], terminal.screens()
                    said[command] = (folder / "terminal-0.txt").read_text()
                assert after.language == "text"
                check_quoted(after.text, said[command])
        yield said, folder
    finally:
        terminal.close()


def test_page_quotes_the_output_of_its_commands(played):
    """The fixture compares; this test checks that there was something to compare."""
    page = PAGE.read_text()
    kinds = [(block.language, bool(block.file)) for block in blocks(page)]
    assert kinds.count(("text", False)) == kinds.count(("bash", False)) == 7
    assert page.count("```") == 2 * len(kinds)
    assert all(page.count(port) >= 2 for port in PORTS)


def test_keys_are_private_and_records_contain_no_sample(played):
    _, folder = played
    for name in NAMES:
        assert os.stat(folder / f"{name}.key.toml").st_mode & 0o077 == 0
        secret = re.search(r'secret = "(.+)"', (folder / f"{name}.key.toml").read_text())[1]
        images = np.load(folder / "data" / name / "train.npz")["input"]
        for path in [
            path
            for path in folder.rglob("*")
            if path.is_file() and f"{name}.key" not in path.name and "data/" not in str(path)
        ]:
            content = path.read_bytes()
            assert secret.encode() not in content
            assert images[0].tobytes() not in content
            assert images[0].astype(np.float64).tobytes() not in content


def test_collected_influences_equal_those_of_each_peer(played):
    _, folder = played
    listed = json.loads((folder / "together" / "influences.json").read_text())
    assert [one["change"] for one in listed] == sorted(one["change"] for one in listed)
    for number, name in enumerate(NAMES):
        own = -load_file(folder / name / "hypergradient.safetensors")["mask"]
        mine = {one["sample"]: one["change"] for one in listed if one["peer"] == name}
        assert mine == {place: float(value) for place, value in enumerate(own)}
        wrong = np.load(folder / f"truth-{name}.npy")
        assert wrong[own.argsort()[: wrong.sum()]].mean() > 0.85, number
