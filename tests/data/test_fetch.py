"""Downloads from a server on this machine.

Correct files arrive whole, wrong files leave nothing behind, and the command line reports both.
"""

import hashlib
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from fedbilevel.cli.main import cli, main
from fedbilevel.data import catalogue, fetch, locations
from fedbilevel.errors import DataError, UnknownNameError

CONTENT = {"/one": bytes(range(256)) * 1000, "/two": b"two"}  # one needs several chunks


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        content = CONTENT.get(self.path.removesuffix("-short").removesuffix("-silent"))
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        if not self.path.endswith("-silent"):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if self.path.endswith("-short") else content)

    def log_message(self, *args):
        pass


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty data folder, and no other place to look in; no proxy stands before this machine."""
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(locations, "CHECKOUT", tmp_path / "none")
    monkeypatch.setattr(locations, "SYSTEM", tmp_path / "none")
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "data"


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.asked = []
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


@pytest.fixture
def known(server, monkeypatch):
    """A set "pair" of two files on the server."""
    address = f"http://127.0.0.1:{server.server_port}"
    files = tuple(
        fetch.File(f"pair{path}.gz", address + path, hashlib.sha256(content).hexdigest())
        for path, content in CONTENT.items()
    )
    monkeypatch.setattr(fetch, "KNOWN", {"pair": files})
    return files


def everything_in(folder):
    return sorted(str(place.relative_to(folder)) for place in folder.rglob("*") if place.is_file())


def test_missing_files_arrive_and_are_not_fetched_again(alone, server, known):
    steps = []
    found = fetch.ensure("pair", progress=lambda *now: steps.append(now))
    assert found == [alone / "pair/one.gz", alone / "pair/two.gz"]
    assert [place.read_bytes() for place in found] == list(CONTENT.values())
    assert everything_in(alone) == ["pair/one.gz", "pair/two.gz"]
    one = [(done, total) for name, done, total in steps if name == "pair/one.gz"]
    assert len(one) > 2
    assert [done for done, _ in one] == sorted(done for done, _ in one)
    assert one[-1] == (256_000, 256_000)
    assert steps[-1] == ("pair/two.gz", 3, 3)
    assert server.asked == ["/one", "/two"]
    assert fetch.ensure("pair") == found
    assert server.asked == ["/one", "/two"]
    umask = os.umask(0)
    os.umask(umask)
    assert found[0].stat().st_mode & 0o777 == 0o666 & ~umask  # readable by whom any new file is


def test_only_what_the_folder_lacks_is_fetched_and_the_folder_named_first_gets_it(alone, server, known, tmp_path):
    given = tmp_path / "given"
    (given / "pair").mkdir(parents=True)
    (given / "pair/one.gz").write_bytes(b"mine")
    assert fetch.ensure("pair", given) == [given / "pair/one.gz", given / "pair/two.gz"]
    assert (given / "pair/one.gz").read_bytes() == b"mine"
    assert server.asked == ["/two"]
    assert not alone.exists()


def test_a_set_that_lies_in_another_folder_or_unpacked_is_not_fetched(alone, server, known, tmp_path):
    elsewhere = tmp_path / "cache/fedbilevel/pair"
    elsewhere.mkdir(parents=True)
    for name in ("one", "two"):
        (elsewhere / name).touch()
    assert fetch.ensure("pair") == [elsewhere / "one", elsewhere / "two"]
    (elsewhere / "two").unlink()
    fetch.ensure("pair")  # half a set is none: readers need all files in one folder
    assert everything_in(alone) == ["pair/one.gz", "pair/two.gz"]


def test_a_wrong_sum_leaves_nothing_and_names_both(alone, known, monkeypatch):
    wrong = known[0]._replace(sha256="0" * 64)
    monkeypatch.setattr(fetch, "KNOWN", {"pair": (wrong, known[1])})
    with pytest.raises(DataError) as error:
        fetch.ensure("pair")
    assert known[0].sha256 in str(error.value)
    assert "expected " + "0" * 64 in str(error.value)
    assert everything_in(alone) == []


@pytest.mark.parametrize(
    ("path", "says"), [("/none", "404"), ("/one-short", "ended after 128000 of 256000 bytes|IncompleteRead")]
)
def test_what_the_server_does_not_give_is_asked_of_the_user(alone, known, monkeypatch, path, says):
    broken = known[0]._replace(url=known[0].url.replace("/one", path))
    monkeypatch.setattr(fetch, "KNOWN", {"pair": (broken, known[1])})
    with pytest.raises(DataError, match=says) as error:
        fetch.ensure("pair")
    assert f"put pair/one.gz, pair/two.gz under {alone} by hand" in str(error.value)
    assert broken.url in str(error.value)
    assert everything_in(alone) == []


def test_a_server_without_a_content_length(alone, known):
    steps = []
    place = fetch.download(known[0]._replace(url=known[0].url + "-silent"), alone, lambda *now: steps.append(now))
    assert place.read_bytes() == CONTENT["/one"]
    assert {total for _, _, total in steps} == {None}


def test_without_a_network_the_user_learns_what_to_put_where(alone, known, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers here
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        monkeypatch.setattr(fetch, "KNOWN", {"pair": tuple(file._replace(url=address) for file in known)})
        with pytest.raises(DataError, match="refused") as error:
            fetch.ensure("pair")
    assert f"put pair/one.gz, pair/two.gz under {alone} by hand" in str(error.value)
    assert everything_in(alone) == []


def test_a_stopped_download_leaves_nothing(alone, known):
    def stop(*now):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.ensure("pair", progress=stop)
    assert everything_in(alone) == []


def test_a_place_that_cannot_be_written_is_reported(alone, known):
    alone.parent.mkdir(exist_ok=True)
    alone.write_text("a file where a folder should be")
    with pytest.raises(DataError, match="could not be fetched"):
        fetch.ensure("pair")


def test_unknown_sets_are_named():
    with pytest.raises(UnknownNameError, match="Did you mean 'mnist'"):
        fetch.ensure("mnst")


def test_the_table_is_whole_and_agrees_with_files_that_are_there():
    assert set(fetch.KNOWN) <= set(catalogue.SETS)
    for files in fetch.KNOWN.values():
        for file in files:
            assert file.url.startswith("https://")
            assert len(bytes.fromhex(file.sha256)) == 32
    try:
        found = {file: locations.find(file.name)[0] for files in fetch.KNOWN.values() for file in files}
    except DataError as missing:
        pytest.skip(str(missing))
    for file, place in found.items():
        assert hashlib.sha256(place.read_bytes()).hexdigest() == file.sha256


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_commands_list_fetch_and_find(alone, known, monkeypatch):
    invoke = lambda *args: CliRunner().invoke(cli, ["data", *args], catch_exceptions=False).output.splitlines()
    monkeypatch.setitem(
        catalogue.SETS,
        "pair",
        catalogue.Entry("two files", lambda data_dir: locations.find("pair/one.gz", "pair/two.gz", data_dir=data_dir)),
    )
    line = lambda: next(line for line in invoke("list") if line.startswith("pair "))
    assert line().endswith("two files (missing; fedbilevel data fetch pair)")
    assert any(line.startswith("cifar10 ") and line.endswith("(missing)") for line in invoke("list"))
    files = [str(alone / "pair/one.gz"), str(alone / "pair/two.gz")]
    assert invoke("fetch", "pair") == files
    assert invoke("where", "pair") == files
    assert line().endswith(f"two files (in {files[0]})")
    assert invoke("where") == [str(place) for place in locations.folders()]
    assert invoke("where", "--data-dir", str(alone / "x"))[0] == str(alone / "x")
    assert len(invoke("list")) == len(catalogue.SETS)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["where", "cifar"], "There is no set of data named 'cifar'. Did you mean 'cifar10'?"),
        (["fetch", "cifar10"], "There is no set of data that can be fetched named 'cifar10'"),
        (["where", "omniglot"], "there is no omniglot/omniglot_28x28.npz in"),
    ],
)
def test_the_commands_fail_in_one_sentence(alone, monkeypatch, capsys, args, sentence):
    monkeypatch.setattr(sys, "argv", ["fedbilevel", "data", *args])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err
