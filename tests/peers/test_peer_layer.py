"""The layer between peers with messages: the simulator's rows and bytes, over memory and sockets."""

import numpy as np
import pytest
from test_peers import HGP, SMALL, check_same, content, simulated

from fedbilevel.errors import PlanError, SettingError
from fedbilevel.peers.plan import plan_of
from fedbilevel.peers.wire import PeerMessage, pack, unpack
from fedbilevel.tasks.quadratic import Quadratic
from support.peers.threads import Threads

pytestmark = [pytest.mark.wait, pytest.mark.slow]
MIX = {**HGP, "lower_solver": "mix"}
GOSSIP = {"network": {"kind": "ring"}, "averaging": {"kind": "gossip", "num_steps": 4}}


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        ({"robust": "trimmed:0.2"}, "float64"),
        ({"robust": "centred:0.5"}, "float32"),
        ({"compress": "int8"}, "float32"),
        ({"compress": "topk:0.5"}, "float64"),
        ({"compress": "randk:0.5", "sequences": {"x": {"compress": "none"}}}, "float64"),
        ({"compress": "int8", "robust": "centred:0.5"}, "float64"),
    ],
    ids=str,
)
def test_peers_equal_the_simulator_bit_for_bit_and_in_bytes(tmp_path, layer, dtype):
    built = Quadratic(**{**SMALL, "num_clients": 5}).build()
    plan = content(
        MIX, Quadratic(**{**SMALL, "num_clients": 5}), options={**GOSSIP, "aggregation": layer, "dtype": dtype}
    )
    threads = Threads(tmp_path, plan, built.clients)
    results, reference = threads.run(), simulated(threads, built)
    check_same(threads, reference)
    for name, total in reference.ledger.items():
        assert (max if name == "rounds" else sum)(result.ledger[name] for result in results) == total, name


def test_compressed_rows_are_bytes_on_the_wire():
    row = np.array([1, 255, 0, 7], dtype=np.uint8)
    head, body = pack(PeerMessage("data", b"r" * 16, 1, array=row))
    assert bytes(body) == row.tobytes()
    assert np.array_equal(unpack(head, body, num_peers=3).array, row)


def test_a_peer_that_sends_nonsense_is_banned(tmp_path, monkeypatch):
    """Peer 1 sends an infinite scale: the others name it, and the run goes on without it."""
    from fedbilevel.peers.exchange import Exchange

    send = Exchange.send_row

    def wrong(exchange, step, row, weight, receivers):
        if exchange._outbox.me == 1 and row.dtype == np.uint8:
            row = row.copy()
            row[-8:] = np.frombuffer(np.array([np.inf]).tobytes(), np.uint8)
        send(exchange, step, row, weight, receivers)

    monkeypatch.setattr(Exchange, "send_row", wrong)
    built = Quadratic(**{**SMALL, "num_clients": 5}).build()
    task = Quadratic(**{**SMALL, "num_clients": 5})
    plan = content(MIX, task, options={**GOSSIP, "aggregation": {"compress": "int8"}}, num_iterations=1)
    threads = Threads(tmp_path, plan, built.clients)
    for number in range(5):
        threads.start(number)
    threads.join([0, 2, 3, 4])
    assert any(
        "sends compressed rows that hold NaN, infinity or places outside the row" in one for one in threads.lines
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"averaging": {"num_steps": 3}, "aggregation": {"robust": "trimmed:0.2"}}, "their quotient has a bias"),
        ({**GOSSIP, "aggregation": {"robust": "krum:1"}}, "peers see the rows of their neighbours only"),
    ],
)
def test_plans_that_peers_cannot_follow_are_refused(options, text):
    with pytest.raises((PlanError, SettingError), match=text):
        plan_of(content(MIX, options=options), 5)
