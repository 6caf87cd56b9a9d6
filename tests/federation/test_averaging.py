"""Push-Sum with running sums: its invariant after every event and its exact average under faults.

The faults are loss and delay. Plain averaging fails under the same faults."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.errors import SettingError
from fedbilevel.federation.averaging import Averaging, Message, RunningSums, parked, robust_steps, spread
from fedbilevel.federation.network import Network
from fedbilevel.federation.network import given as given_network


def start(n, width, seed):
    """Rows of different size and weights from 0.5 to 2; the exact weighted average."""
    draw = torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows, weights = (
        draw * torch.logspace(-1, 1, n, dtype=torch.float64)[:, None] + 1,
        torch.linspace(0.5, 2, n, dtype=torch.float64),
    )
    return rows, weights, weights @ rows / weights.sum()


def peers_of(rows, weights):
    return [
        RunningSums(i, row * weight, weight) for i, (row, weight) in enumerate(zip(rows, weights.tolist(), strict=True))
    ]


def error(peers, exact, rows):
    return float((torch.stack([peer.value for peer in peers]) - exact).abs().max() / rows.abs().max())


# ---- running sums --------------------------------------------------------------------------------


class Model:
    """A model of the algorithm with arrays over all edges.

    sigma is the sum pushed along (i, j), and rho is the part of it that j has received."""

    def __init__(self, mass):
        n, width = mass.shape
        self.mass, self.sigma, self.rho = mass.copy(), np.zeros((n, n, width)), np.zeros((n, n, width))
        self.sent, self.seen = np.zeros((n, n), dtype=int), np.zeros((n, n), dtype=int)

    def wake(self, i, out):
        self.mass[i] /= 1 + len(out)
        for j in out:
            self.sigma[i, j] += self.mass[i]
            self.sent[i, j] += 1
        return [(i, j, self.sent[i, j], self.sigma[i, j].copy()) for j in out]

    def receive(self, i, j, number, total):
        if number <= self.seen[i, j]:
            return False
        self.mass[j] += total - self.rho[i, j]
        self.rho[i, j], self.seen[i, j] = total, number
        return True


what = st.sampled_from(["wake", "wake", "deliver", "deliver", "lose", "twice", "again"])
events = st.lists(st.tuples(what, st.integers(0, 63), st.integers(0, 63)), max_size=60)


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**6), events)
def test_no_event_changes_what_all_peers_and_edges_hold_together(n, width, seed, happened):
    rows, weights, _ = start(n, width, seed)
    peers = peers_of(rows, weights)
    model = Model(np.concatenate([(rows * weights[:, None]).numpy(), weights[:, None].numpy()], axis=1))
    whole, scale = model.mass.sum(0), np.abs(model.mass).sum(0)
    wire, old, newest = [], [], {}

    def deliver(pair):
        message, copy = pair
        before = [peer.mass.clone() for peer in peers]
        fresh = message.number > newest.get((message.sender, message.receiver), 0)
        assert peers[message.receiver].receive(message) is fresh
        assert model.receive(*copy) is fresh
        if fresh:
            newest[message.sender, message.receiver] = message.number
        assert all(
            torch.equal(peer.mass, was)
            for i, (peer, was) in enumerate(zip(peers, before, strict=True))
            if i != message.receiver or not fresh
        )
        old.append(pair)

    for what, a, b in happened:
        if what == "wake":
            i, out = a % n, [j for j in range(n) if b >> j & 1 and j != a % n]
            wire += list(zip(peers[i].wake(out), model.wake(i, out), strict=True))
        elif what == "again" and old:
            deliver(old[a % len(old)])
        elif wire and what != "again":
            pair = wire[a % len(wire)] if what == "twice" else wire.pop(a % len(wire))
            if what != "lose":
                deliver(pair)
        together = (torch.stack([peer.mass for peer in peers]).sum(0) + parked(peers)).numpy()
        np.testing.assert_allclose(together, whole, rtol=0, atol=1e-12 * scale.min())
        np.testing.assert_allclose(
            torch.stack([peer.mass for peer in peers]).numpy(), model.mass, rtol=0, atol=1e-12 * scale.min()
        )
        np.testing.assert_allclose(
            parked(peers).numpy(), (model.sigma - model.rho).sum((0, 1)), rtol=0, atol=1e-12 * scale.min()
        )
        assert all(float(peer.mass[-1]) > 0 for peer in peers)
    for peer in peers:  # the newest message of every edge brings all that is parked there
        for receiver, (number, total) in peer.sent.items():
            peers[receiver].receive(Message(peer.number, receiver, number, total))
    assert bool((parked(peers) == 0).all())
    np.testing.assert_allclose(
        torch.stack([peer.mass for peer in peers]).sum(0).numpy(), whole, rtol=0, atol=1e-12 * scale.min()
    )


def test_a_late_message_brings_what_lost_ones_carried_and_an_old_one_nothing():
    one, two = RunningSums(0, torch.tensor([8.0, -4.0])), RunningSums(1, torch.tensor([0.0, 2.0]))
    first, second, third = (one.wake([1])[0] for _ in range(3))
    assert one.mass.tolist() == [1, -0.5, 0.125]
    assert parked([one, two]).tolist() == [7, -3.5, 0.875]
    assert two.receive(second)  # the first is late
    assert two.mass.tolist() == [6, -1, 1.75]
    assert not two.receive(first)
    assert not two.receive(second)
    assert two.mass.tolist() == [6, -1, 1.75]
    assert two.receive(third)
    assert two.mass.tolist() == [7, -1.5, 1.875]
    assert parked([one, two]).tolist() == [0, 0, 0]
    assert two.value.tolist() == [7 / 1.875, -1.5 / 1.875]
    assert two.mass.dtype == torch.float64


def test_a_peer_that_wakes_alone_keeps_its_mass():
    peer = RunningSums(0, torch.tensor([3.0]), 2.0)
    assert peer.wake([]) == []
    assert peer.mass.tolist() == [3, 2]


# ---- steps with faults ---------------------------------------------------------------------------


@st.composite
def jointly_connected(draw):
    """A periodic sequence of sparse digraphs whose union over a period has a cycle of all peers."""
    n, period, seed = draw(st.integers(2, 6)), draw(st.integers(1, 3)), draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    steps, order = rng.random((period, n, n)) < draw(st.floats(0, 0.3)), rng.permutation(n)
    for place in range(n):
        steps[rng.integers(period), order[place], order[(place + 1) % n]] = True
    return n, steps, seed


@settings(max_examples=7)
@given(jointly_connected())
def test_robust_push_sum_reaches_the_exact_average_under_loss_delay_and_sleep(drawn):
    n, steps, seed = drawn
    links = given_network(n, lambda step: steps[step % len(steps)]).between(n)
    assert links.connected_within <= len(steps)
    rows, weights, exact = start(n, 2, seed)
    peers = peers_of(rows, weights)
    advance = robust_steps(peers, Network(loss=0.3, max_delay=5, activity=0.5, seed=seed), links, 0, lambda _: None)
    good = 0
    for _ in range(400 * n * len(steps)):
        advance()
        good = good + 1 if error(peers, exact, rows) < 1e-10 else 0
        if good == 20:  # and stays there
            break
    assert good == 20, f"the error is {error(peers, exact, rows)}"


def test_without_faults_robust_steps_are_plain_push_sum():
    n, network = 5, Network(kind="random_directed", seed=3)
    links, (rows, weights, exact) = network.between(n), start(5, 3, 1)
    peers, z, w = peers_of(rows, weights), rows * weights[:, None], weights[:, None]
    advance = robust_steps(peers, network, links, 4, lambda _: None)
    for step in range(4, 34):
        who = links.adjacency(step).double()
        matrix = (who / who.sum(1, keepdim=True)).T
        z, w = matrix @ z, matrix @ w
        advance()
        torch.testing.assert_close(
            torch.stack([peer.mass for peer in peers]), torch.cat([z, w], dim=1), rtol=1e-12, atol=1e-13
        )
        assert float(parked(peers).abs().max()) < 1e-13
    assert error(peers, exact, rows) < 1e-10


def test_steps_depend_on_the_seed_and_their_number_alone():
    """Peers that restart at step 6 act as if they had not stopped; another seed acts differently."""

    def masses(first, num, peers, seed=2):
        advance = robust_steps(
            peers, Network(kind="random_directed", loss=0.4, activity=0.6, seed=seed), links, first, lambda _: None
        )
        for _ in range(num):
            advance()
        return torch.stack([peer.mass for peer in peers])

    links, (rows, weights, _) = Network(kind="random_directed", seed=9).between(4), start(4, 2, 0)
    whole, parts = peers_of(rows, weights), peers_of(rows, weights)
    masses(0, 6, parts)
    assert torch.equal(masses(0, 15, whole), masses(6, 9, parts))
    assert not torch.equal(masses(0, 15, peers_of(rows, weights), seed=3), torch.stack([peer.mass for peer in whole]))


class Recorded(RunningSums):
    """Notes when what was sent and what came, by (sender, receiver, number)."""

    def __init__(self, number, row, log):
        super().__init__(number, row)
        self.log = log

    def wake(self, receivers):
        self.log["awake"].append((self.log["step"], self.number))
        messages = super().wake(receivers)
        self.log["sent"].update({message[:3]: self.log["step"] for message in messages})
        return messages

    def receive(self, message):
        assert message.receiver == self.number
        assert message[:3] not in self.log["came"]
        self.log["came"][message[:3]] = self.log["step"]
        return super().receive(message)


def test_faults_come_as_often_as_the_network_says_and_every_message_is_paid_for():
    n, num, loss, activity, max_delay = 4, 500, 0.3, 0.6, 3
    log, paid = {"step": 0, "awake": [], "sent": {}, "came": {}}, torch.zeros(n, n)
    network = Network(kind="ring", loss=loss, activity=activity, max_delay=max_delay, seed=1)
    peers = [Recorded(i, torch.ones(1), log) for i in range(n)]
    advance = robust_steps(peers, network, network.between(n), 0, lambda sent: paid.add_(sent))
    for log["step"] in range(num):
        advance()
    sent = np.zeros((n, n))
    for i, j, _ in log["sent"]:
        sent[i, j] += 1
    np.testing.assert_array_equal(paid.numpy(), sent)  # lost ones too
    assert {(i, j) for i, j, _ in log["sent"]} == {
        (i, j) for i in range(n) for j in range(n) if (i - j) % n in (1, n - 1)
    }
    within = lambda count, of, chance: abs(count / of - chance) < 4 * (chance * (1 - chance) / of) ** 0.5
    assert within(len(log["awake"]), n * num, activity)
    assert all(within(sum(i == who for _, who in log["awake"]), num, activity) for i in range(n))
    assert within(
        num - len({step for step, _ in log["awake"]}), num, (1 - activity) ** n
    )  # all asleep: each is drawn by itself
    assert set(log["came"]) <= set(log["sent"])
    settled = [key for key, step in log["sent"].items() if step < num - max_delay]
    assert within(sum(key in log["came"] for key in settled), len(settled), 1 - loss)
    delays = [log["came"][key] - log["sent"][key] for key in settled if key in log["came"]]
    assert all(within(delays.count(late), len(delays), 1 / (max_delay + 1)) for late in range(max_delay + 1))
    assert set(delays) == set(range(max_delay + 1))
    arrivals = [number for i, j, number in log["came"] if (i, j) == (0, 1)]
    assert arrivals != sorted(arrivals)  # they overtake each other


# ---- plain averaging under faults ----------------------------------------------------------------


def test_plain_push_sum_never_recovers_what_a_lost_message_carried():
    n, steps = 6, 150
    network = Network(kind="random_directed", loss=0.3, seed=5)
    links, (rows, weights, exact) = network.between(n), start(n, 3, 2)
    peers, z, w = peers_of(rows, weights), rows * weights[:, None], weights[:, None]
    advance, rng, errors, mass = (
        robust_steps(peers, network, links, 0, lambda _: None),
        np.random.default_rng(0),
        [],
        [],
    )
    for step in range(steps):
        arrives = torch.from_numpy((rng.random((n, n)) >= 0.3) | np.eye(n, dtype=bool))
        matrix = links.mixing(step).matrix * arrives
        z, w = matrix @ z, matrix @ w
        advance()
        errors.append(float((z / w - exact).abs().max() / rows.abs().max()))
        mass.append(float(w.sum()))
    assert spread(z / w, rows.abs().max()) < 1e-10  # they agree, on something else
    assert min(errors) > 1e-3
    assert mass[-1] < 1e-6 * mass[0]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(mass))
    assert error(peers, exact, rows) < 1e-10


def test_a_directed_network_needs_column_sums_of_one_and_the_division_by_the_weights():
    n = 5
    links, (rows, weights, exact) = Network(kind="random_directed", seed=8).between(n), start(5, 3, 4)
    scale = rows.abs().max()
    z, w = rows * weights[:, None], weights[:, None]
    by_row, undivided = rows.clone(), {}
    for step in range(200):
        mixing, who = links.mixing(step), links.adjacency(step).double()
        z, w = mixing(z), mixing(w)
        by_row = (who / who.sum(0)).T @ by_row
        undivided[step + 1] = float((z * n / weights.sum() - exact).abs().max() / scale)
    assert float((z / w - exact).abs().max() / scale) < 1e-13
    assert min(undivided[num] for num in (10, 50, 100, 200)) > 1e-2  # as wrong after 200 steps as after 10
    plain_mean = rows.mean(0)
    assert spread(by_row, scale) < 1e-13  # receivers that divide agree as well, on what depends on the network
    assert float((by_row - plain_mean).abs().max() / scale) > 1e-2
    assert float((by_row - exact).abs().max() / scale) > 1e-2


# ---- settings and distances ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["push_sum", "gossip", "exact"])
@pytest.mark.parametrize("fault", [{"loss": 0.1}, {"max_delay": 2}, {"activity": 0.5}])
def test_only_robust_averaging_bears_faults(kind, fault):
    network = Network(**fault)
    with pytest.raises(
        SettingError,
        match=(
            f"delays messages, and {kind} averaging never recovers what a lost message carried: use averaging 'robust'"
        ),
    ):
        Averaging(kind=kind).check(network, network.between(3))
    Averaging(kind="robust").check(network, network.between(3))


def test_gossip_needs_shares_that_sum_to_one_at_the_receiver():
    sentence = (
        "gossip needs shares that sum to one at the receiver too, which those by out-degree do not: "
        "use averaging 'push_sum', or metropolis shares on an"
    )
    for network in (
        Network(kind="exponential"),
        Network(kind="ring", shares="out_degree"),
        given_network(3, lambda _: np.ones((3, 3))),
    ):
        with pytest.raises(SettingError, match=sentence):
            Averaging(kind="gossip").check(network, network.between(3))
        for kind in ("push_sum", "exact", "robust"):
            Averaging(kind=kind).check(network, network.between(3))
    for shares in ("auto", "metropolis", "fastest"):
        Averaging(kind="gossip").check(Network(kind="ring"), Network(kind="ring", shares=shares).between(3))


def test_settings_out_of_range_are_refused():
    for bad, sentence in (
        ({"num_steps": 0}, "num_steps is 0, expected a value at least 1"),
        ({"tolerance": 0.0}, "tolerance is 0.0, expected a value greater"),
        ({"kind": "median"}, "kind is 'median', expected 'push_sum' or 'gossip'"),
        ({"max_steps": 0}, "max_steps is 0"),
    ):
        with pytest.raises(SettingError, match=sentence):
            Averaging(**bad)


def test_spread_is_the_largest_distance_from_the_mean():
    rows = torch.tensor([[3.0, 4.0], [-9.0, -12.0], [0.0, 0.0], [6.0, 8.0]], dtype=torch.float64)
    assert spread(rows, torch.tensor(5.0, dtype=torch.float64)) == pytest.approx(3, rel=1e-15)
    assert spread(rows + 7, torch.tensor(2.5)) == pytest.approx(6, rel=1e-15)
    assert spread(rows[1].expand(4, 2), torch.tensor(1.0)) == 0


@pytest.mark.parametrize("scale", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_zeros_agree_whatever_the_types(dtype, scale):
    """Robust averages are float64 while the rows, and so the scale, may be float32."""
    assert spread(torch.zeros(3, 2, dtype=dtype), torch.zeros((), dtype=scale)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_peer_that_hears_nothing_for_long_stays_between_the_rows(seed):
    """The mass of an isolated peer halves at every step.

    Once it is below the rounding of the running sums, a message would give noise, not a value."""
    network, rows = (
        Network(kind="ring", loss=0.99, seed=seed),
        torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64),
    )
    peers = peers_of(rows, torch.ones(2))
    total = sum(peer.mass for peer in peers)
    advance = robust_steps(peers, network, network.between(2), 0, lambda sent: None)
    for _ in range(600):
        advance()
        values = torch.stack([peer.value for peer in peers])
        assert bool((values >= rows.min(0).values - 1e-6).all())
        assert bool((values <= rows.max(0).values + 1e-6).all())
        torch.testing.assert_close(sum(peer.mass for peer in peers) + parked(peers), total, rtol=0, atol=1e-12)
