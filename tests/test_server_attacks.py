"""Attacks of one site on the server, in one process: the site is named, and what it says does not count for more than it should."""

import pytest


from fedbilevel.federation_cli import line
from fedbilevel.sites import serve as serving
from loopback import Loopback


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr("fedbilevel.engines.sites._APART", (0.0, 0.0))
    monkeypatch.setattr(serving, "_BETWEEN", 0.0)
    yield
    Loopback.close_all()


def at(kind, change, who="site-1"):
    """A site that changes the header and the arrays of its answers to messages of one kind."""
    return lambda name, header: change if name == who and header["kind"] == kind else None


# ---- weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num", "counted"), [(2, [4, 40]), (3, [4, 50, 6])])
def test_attack_by_a_false_weight_is_cut_by_what_the_others_say_and_told(tmp_path, num, counted):
    federation, said = Loopback(tmp_path, num), []
    ours = federation.plan({"name": "fedavg"}, {"name": "quadratic", "num_clients": num, "weights": "by_samples"})
    lie = at("join", lambda header, arrays: ({**header, "weights": [399]}, arrays))
    assert federation.serve(ours, lie, said.append) == "finished"
    assert federation.record.load()[0]["sites.weight"].tolist() == counted
    stated = {"site-0": [4], "site-1": [399], "site-2": [6]}
    assert said[0]["weights"] == {name: stated[name] for name in federation.names}
    assert set(said[0]["capped"]) == {"site-1"}
    assert "weight of site-0 4, weight of site-1 399" in line(said[0])
    assert not any("weights" in later or later["capped"] for later in said[1:])


def test_equal_weights_are_not_told(tmp_path):
    federation, said = Loopback(tmp_path), []
    federation.serve(federation.plan({"name": "fedavg"}), say=said.append)
    assert not any("weights" in one for one in said)
