"""The layer between peers: dense steps by hand, kept sums, attackers, copies, bytes, refusals."""

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.sparkle import Sparkle
from fedbilevel.engines import neighbours
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import CheckpointError, SettingError
from fedbilevel.federation.algorithm import debiased
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.problem.draws import Stream
from fedbilevel.tasks.quadratic import Quadratic

MIX = HGP(lower_solver="mix", num_terms=3, num_lower_steps=2)
RING, TORUS = Network(kind="ring"), Network(kind="torus")


def engine(aggregation, num_steps=1, num=6, network=RING, algorithm=MIX, **more):
    built = Quadratic(num_clients=num, **more.pop("task", {})).build()
    more = {"averaging": Averaging(kind="gossip", num_steps=num_steps), "dtype": torch.float64, **more}
    return PeerSimulation(algorithm, *built, network=network, aggregation=aggregation, **more)


def rows_of(num=6, width=5, seed=0):
    return torch.randn(num, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def far(one, other):
    return float((one - other).abs().max())


def test_a_wide_radius_is_plain_gossip():
    x, y = rows_of(), rows_of(seed=1)
    plain = engine(None, 4).mix(x=x, y=y)
    clipped = engine(fb.Aggregation(robust="centred:1e6"), 4).mix(x=x, y=y)
    assert max(far(*pair) for pair in zip(plain, clipped, strict=True)) < 1e-14


def test_a_step_of_centred_clipping_and_of_a_trimmed_mean_by_hand():
    """On a ring of six with shares of a third: numpy, peer by peer."""
    y = rows_of().numpy()
    clipped, trimmed = np.empty_like(y), np.empty_like(y)
    for i in range(6):
        near = y[[(i - 1) % 6, i, (i + 1) % 6]]
        away = near - y[i]
        norms = np.linalg.norm(away, axis=1, keepdims=True)
        clipped[i] = y[i] + (away * np.minimum(1, 0.7 / np.maximum(norms, 1e-300))).sum(0) / 3
        ordered = np.sort(near, axis=0)
        part = 1 / 3 - 0.2  # of the lowest and the highest row
        trimmed[i] = (part * ordered[0] + ordered[1] / 3 + part * ordered[2]) / (1 - 2 * 0.2)
    for rule, expected in (("centred:0.7", clipped), ("trimmed:0.2", trimmed)):
        found = engine(fb.Aggregation(robust=rule)).mix(y=torch.from_numpy(y))
        assert far(found, torch.from_numpy(expected)) < 1e-14


def test_each_sequence_has_its_own_norm_and_its_own_rule():
    x, y = rows_of() * 1e3, rows_of(seed=1)
    alone = engine(fb.Aggregation(robust="centred:0.5")).mix(y=y)
    layer = fb.Aggregation(robust="centred:0.5", sequences={"x": {"robust": "none"}})
    both = engine(layer).mix(x=x, y=y)
    assert torch.equal(both[1], alone)
    assert far(both[0], engine(None).mix(x=x)) < 1e-11


@pytest.mark.parametrize(
    "layer", [{"robust": "centred:0.3"}, {"compress": "int8"}, {"compress": "topk:0.4"}, {"compress": "randk:0.4"}]
)
def test_the_sum_over_peers_is_kept(layer):
    y = rows_of()
    found = engine(fb.Aggregation(**layer), 7).mix(y=y)
    assert far(found.mean(0), y.mean(0)) < 1e-13
    assert far(found, y) > 1e-2


def test_a_trimmed_mean_of_neighbours_does_not_keep_the_sum():
    """The price of trimming: peers that differ agree on a value other than their mean."""
    y = rows_of() ** 2  # skewed
    found = engine(fb.Aggregation(robust="trimmed:0.3"), 200).mix(y=y)
    assert far(found, found.mean(0)) < 1e-6
    assert far(found.mean(0), y.mean(0)) > 0.05


@pytest.mark.parametrize(("rule", "limit"), [(None, np.inf), ("trimmed:0.34", 0.0), ("centred:0.1", 0.3)])
def test_what_honest_peers_keep_of_an_attacker(rule, limit):
    """Peer 2 of six starts with a row of 1e6. By one step, a trimmed mean leaves the honest peers in
    the range of honest rows; centred clipping moves each by at most the radius times the share."""
    y = rows_of()
    y[2] = 1e6
    honest = [0, 1, 3, 4, 5]
    layer = None if rule is None else fb.Aggregation(robust=rule)
    found = engine(layer).mix(y=y)[honest]
    low, high = y[honest].min(0).values, y[honest].max(0).values
    over = float(torch.maximum(found - high, low - found).max())
    assert over > 1e5 if rule is None else over <= limit


@pytest.mark.parametrize(("compress", "num_steps"), [("int8", 60), ("topk:0.5", 400), ("randk:0.5", 400)])
def test_compressed_gossip_tends_to_the_mean(compress, num_steps):
    """The rest of a step is sent later: plain gossip of rows that were rounded once would stay off."""
    y = rows_of(8, 12)
    apart = [far(engine(fb.Aggregation(compress=compress), n, 8, TORUS).mix(y=y), y.mean(0)) for n in (5, num_steps)]
    assert apart[1] < 1e-6 < 1e-2 < apart[0] or (compress == "int8" and apart[1] < 1e-9 < 1e-3 < apart[0])
    once = neighbours.NeighbourLayer(fb.Aggregation(compress="int8"), Stream(0)).parts({"y": 12}, 0, 0)
    rounded = neighbours.heard(once, torch.zeros_like(y), neighbours.message(once, y, torch.zeros_like(y)))
    assert far(rounded.mean(0), y.mean(0)) > 1e-4


@pytest.mark.parametrize(
    ("compress", "floats", "num_bytes"),
    [("int8", 12, 12 + 8), ("topk:0.25", 3, 3 * (8 + 4)), ("randk:0.25", 3, 3 * 8), (None, 12, 12 * 8)],
)
def test_the_ledger_counts_what_peers_send(compress, floats, num_bytes):
    """A ring of six has twelve messages in a step."""
    fed = engine(fb.Aggregation(robust="centred:1.0", compress=compress), 3)
    fed.mix(y=rows_of(6, 12))
    bill = fed.bill()
    assert bill.totals()["floats_up"] == 3 * 12 * floats
    assert bill.totals()["bytes_up"] == 3 * 12 * num_bytes
    assert bill.totals()["rounds"] == 3
    parts = fed.layer.parts({"y": 12}, 0, 0)
    sent = neighbours.message(parts, rows_of(1, 12), torch.zeros(1, 12, dtype=torch.float64))
    assert sent.shape[1] * sent.element_size() == num_bytes


@pytest.mark.parametrize("network", [RING, TORUS], ids=["ring", "torus"])
def test_only_int8_saves_bytes_to_the_same_agreement(network):
    """Bytes until eight peers agree up to 1e-3: an eighth with int8, and no saving with a share of
    the entries, whose averages need more steps."""
    averaging, paid = Averaging(kind="gossip", tolerance=1e-3), {}
    for compress in (None, "int8", "topk:0.5", "randk:0.5", "topk:0.1", "randk:0.1"):
        layer = None if compress is None else fb.Aggregation(compress=compress)
        fed = engine(layer, num=8, network=network, averaging=averaging)
        fed.mix(y=rows_of(8, 200))
        paid[compress] = fed.bill().totals()["bytes_up"]
    plain = paid.pop(None)
    assert paid.pop("int8") < plain / 7
    assert min(paid.values()) > 0.9 * plain


@pytest.mark.parametrize(("share", "agrees"), [(0.3, True), (0.34, False)])
def test_trimming_more_than_a_neighbours_share_ends_agreement(share, agrees):
    found = engine(fb.Aggregation(robust=f"trimmed:{share}"), 500).mix(y=rows_of())
    assert (far(found, found.mean(0)) < 1e-9) == agrees


@pytest.mark.parametrize("layer", [{"robust": "trimmed:0.2", "compress": "int8"}, {"compress": "randk:0.5"}], ids=str)
def test_the_order_of_peers_in_memory_leaves_no_bit(layer):
    y, ids = rows_of(), [4, 0, 5, 2, 1, 3]
    one = engine(fb.Aggregation(**layer), 3).mix(y=y)
    other = engine(fb.Aggregation(**layer), 3, ids=ids).mix(y=y[ids])
    assert torch.equal(one[ids], other)


def test_a_run_under_the_layer_resumes_bit_for_bit_and_knows_its_settings(tmp_path):
    built = Quadratic(num_clients=6).build()
    layer = fb.Aggregation(robust="centred:1.0", compress="int8")
    where = {"network": RING, "averaging": Averaging(kind="gossip", num_steps=4), "aggregation": layer}
    go = lambda num, **more: fb.solve(*built, MIX, num_iterations=num, **where, **more)
    whole = go(4)
    go(2, record=tmp_path / "run")
    again = go(4, record=tmp_path / "run", resume=True)
    assert torch.equal(whole.state.y, again.state.y)
    assert whole.ledger == again.ledger
    with pytest.raises(CheckpointError, match="aggregation"):
        fb.solve(*built, MIX, num_iterations=5, network=RING, averaging=where["averaging"], record=tmp_path / "run",
                 resume=True)  # fmt: skip


def test_trimming_push_sum_has_a_bias():
    """All peers of a directed network hold the same row: the mean is that row, and Push-Sum finds
    it. Trimmed sums of rows whose weights are not trimmed lose it, whatever the number of steps."""
    links = Network(kind="random_directed", seed=1).between(6)
    y, plain, trimmed = torch.ones(6, 3, dtype=torch.float64), None, None
    for trims in (False, True):
        z, w = y.clone(), torch.ones(6, 1, dtype=torch.float64)
        for step in range(50):
            mixing = links.mixing(step)
            near = [mixing.adjacency[:, i].nonzero()[:, 0] for i in range(6)]
            sums = [(z * mixing.send[:, None])[some] for some in near]
            cut = [
                rows.sort(0).values[1:-1] * (len(rows) / (len(rows) - 2)) if len(rows) > 2 else rows for rows in sums
            ]
            z, w = torch.stack([rows.sum(0) for rows in (cut if trims else sums)]), mixing(w)
        plain, trimmed = (debiased(z, w), trimmed) if not trims else (plain, debiased(z, w))
    assert far(plain, y) < 1e-12
    assert far(trimmed, y) > 1e-2


@pytest.mark.parametrize(
    ("layer", "more", "text"),
    [
        ({"robust": "trimmed:0.2"}, {"averaging": Averaging()}, "no longer fit their weights, so their quotient has a"),
        ({"compress": "int8"}, {"averaging": Averaging(kind="exact")}, "no longer fit their weights"),
        ({"robust": "median"}, {}, "robust is median, and peers see the rows of their neighbours only: use trimmed"),
        ({"robust": "trimmed:0.2", "outside": 0.1}, {}, "robust is trimmed:0.2 with outside, and peers"),
        ({"secure": True}, {}, "there is no server that would see a sum only"),
        ({"clip": 1.0}, {}, "peers send whole rows"),
        ({"compress": "powersgd:1"}, {}, "the share of a row that it sends is not known"),
        ({"compress": "int8"}, {"algorithm": Sparkle()}, "sparkle with these settings also sends rows by gossip"),
        ({"compress": "int8"}, {"algorithm": HGP()}, "hgp with these settings also sends rows by push"),
        ({"compress": "int8"}, {"network": Network(kind="random_undirected")}, "the network changes from step to step"),
        (
            {"compress": "int8"},
            {"task": {"client_weights": "by_samples", "num_samples": 7}},
            "the clients have unequal weights",
        ),
    ],
)
def test_what_peers_cannot_do_is_refused_before_a_run(layer, more, text):
    with pytest.raises(SettingError, match=text):
        engine(fb.Aggregation(**layer), **more)


def test_messages_that_hold_nonsense_are_noticed():
    layer = neighbours.NeighbourLayer(
        fb.Aggregation(compress="topk:0.4", sequences={"x": {"compress": "int8"}}), Stream(0)
    )
    parts = layer.parts({"y": 5, "x": 3}, 1, 0)
    zeros = torch.zeros(1, 8, dtype=torch.float64)
    good = neighbours.message(parts, rows_of(1, 8), zeros)[0]
    assert neighbours.is_valid(parts, good, torch.float64)
    outside, endless = good.clone(), good.clone()
    outside[2 * 8 : 2 * 8 + 4] = torch.tensor([9, 0, 0, 0], dtype=torch.uint8)
    endless[-8:] = torch.tensor([np.inf]).double().view(torch.uint8)
    assert not neighbours.is_valid(parts, outside, torch.float64)
    assert not neighbours.is_valid(parts, endless, torch.float64)
