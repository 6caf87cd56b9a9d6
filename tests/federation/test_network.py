"""The edges of a network and their matrices against definitions in numpy and networkx."""

import json
import math

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.errors import NetworkError, SettingError
from fedbilevel.federation import mixing as mixing_module
from fedbilevel.federation.mixing import Mixing, fastest_mixing, metropolis
from fedbilevel.federation.network import GivenNetwork, Network
from fedbilevel.federation.network import given as given_network
from fedbilevel.problem.draws import Stream

UNDIRECTED = ("complete", "ring", "torus", "erdos_renyi", "random_undirected")
DIRECTED = ("exponential", "random_directed")
RANDOM = ("random_undirected", "random_directed")
SIZES = (1, 2, 3, 5, 7, 8, 12)


def adjacency(kind, n, step=0, **settings):
    return Network(kind=kind, **settings).between(n).adjacency(step).numpy()


def with_loops(graph):
    return torch.from_numpy(nx.to_numpy_array(graph) > 0) | torch.eye(len(graph), dtype=torch.bool)


def rows_of(n, width=3, seed=0, dtype=torch.float64):
    """Every peer has its own scale and its own offset."""
    draw = torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (draw * torch.logspace(-1, 1, n, dtype=torch.float64)[:, None] + torch.arange(n)[:, None]).to(dtype)


def second(matrix):
    """The second largest |eigenvalue| of a symmetric matrix that keeps the constant vector."""
    return float(np.abs(np.linalg.eigvalsh(np.asarray(matrix) - 1 / len(matrix))).max())


# ---- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", UNDIRECTED + DIRECTED)
def test_every_kind_has_loops_for_any_number_of_peers_and_is_a_function_of_the_step_alone(kind, n):
    first, again = Network(kind=kind, seed=4).between(n), Network(kind=kind, seed=4).between(n)
    forward = [first.adjacency(step) for step in range(6)]
    for step in (5, 0, 3, 1, 4, 2):
        assert torch.equal(again.adjacency(step), forward[step])
        assert torch.equal(again.mixing(step).adjacency, forward[step])
    for links in forward:
        assert links.shape == (n, n)
        assert links.dtype == torch.bool
        assert bool(links.diagonal().all())
        assert first.directed or torch.equal(links, links.T)


@pytest.mark.parametrize("n", SIZES)
def test_complete_and_ring(n):
    assert adjacency("complete", n).all()
    expected = np.array([[(i - j) % n in (0, 1, n - 1) for j in range(n)] for i in range(n)])
    np.testing.assert_array_equal(adjacency("ring", n), expected)


@pytest.mark.parametrize(("n", "height"), [(1, 1), (4, 2), (6, 2), (7, 1), (9, 3), (12, 3), (16, 4), (30, 5)])
def test_torus_is_as_square_as_can_be(n, height):
    width = n // height
    expected = np.zeros((n, n), dtype=bool)
    for a in range(height):
        for b in range(width):
            for c, d in ((a, b), (a + 1, b), (a - 1, b), (a, b + 1), (a, b - 1)):
                expected[a * width + b, c % height * width + d % width] = True
    np.testing.assert_array_equal(adjacency("torus", n), expected)


@pytest.mark.parametrize("n", SIZES)
def test_exponential_has_one_receiver_1_2_4_places_ahead(n):
    hops = [hop for hop in (1, 2, 4, 8) if hop < n] or [1]
    for step in range(2 * len(hops) + 1):
        expected = np.eye(n, dtype=bool)
        for i in range(n):
            expected[i, (i + hops[step % len(hops)]) % n] = True
        np.testing.assert_array_equal(adjacency("exponential", n, step), expected)
        if n > 1:
            assert (adjacency("exponential", n, step).sum(1) == 2).all()


def test_exponential_averages_eight_peers_exactly_in_three_steps_and_not_in_two():
    links, share = Network(kind="exponential").between(8), torch.linspace(0.5, 2, 8, dtype=torch.float64)[:, None]
    values = rows_of(8)
    exact = (share * values).sum(0) / share.sum()
    z, w, errors = share * values, share, []
    for step in range(3):
        z, w = links.mixing(step)(z), links.mixing(step)(w)
        errors.append(float((z / w - exact).abs().max() / values.abs().max()))
    assert errors[1] > 1e-2
    assert errors[2] < 1e-15


@pytest.mark.parametrize("kind", RANDOM)
def test_every_random_edge_has_its_own_probability_drawn_once(kind):
    n, num, lowest, highest = 7, 1500, 0.3, 0.8
    links = Network(kind=kind, lowest=lowest, highest=highest, seed=2).between(n)
    pairs = [(i, j) for i in range(n) for j in range(n) if (i < j if kind == "random_undirected" else i != j)]
    seen = np.array(
        [[bool(now[i, j]) for i, j in pairs] for now in (links.adjacency(step).numpy() for step in range(num))],
        dtype=float,
    )
    often, noise = seen.mean(0), 0.5 / num**0.5
    assert lowest - 4 * noise < often.min() < lowest + 0.15
    assert highest - 0.15 < often.max() < highest + 4 * noise
    assert (
        often.std() > 0.6 * (highest - lowest) / 12**0.5 > 5 * noise
    )  # were it drawn anew at every step, all would come equally often
    halves = seen[: num // 2].mean(0), seen[num // 2 :].mean(0)
    assert np.corrcoef(*halves)[0, 1] > 0.95
    assert np.abs(np.corrcoef(seen.T) - np.eye(len(pairs))).max() < 5 / num**0.5  # no two edges are drawn together
    after = np.corrcoef(np.concatenate([seen[:-1] - often, seen[1:] - often], axis=1).T)[: len(pairs), len(pairs) :]
    assert np.abs(after).max() < 5 / num**0.5  # nor one step like the last


@pytest.mark.parametrize("kind", RANDOM)
def test_random_networks_change_with_seed_and_step_and_keep_their_bounds(kind):
    drawn = [adjacency(kind, 9, step, seed=seed) for seed in range(3) for step in range(3)]
    assert all((a != b).any() for i, a in enumerate(drawn) for b in drawn[:i])
    for step in range(5):
        assert adjacency(kind, 9, step, lowest=1.0, highest=1.0).all()
        np.testing.assert_array_equal(adjacency(kind, 9, step, lowest=0.0, highest=0.0), np.eye(9, dtype=bool))
    if kind == "random_directed":
        assert any((a != a.T).any() for a in drawn)


def test_erdos_renyi_is_drawn_once_per_seed_with_its_probability():
    n, num = 12, 60
    drawn = [adjacency("erdos_renyi", n, probability=0.3, seed=seed) for seed in range(num)]
    assert all((a != b).any() for i, a in enumerate(drawn) for b in drawn[:i])
    np.testing.assert_array_equal(adjacency("erdos_renyi", n, 17, probability=0.3, seed=5), drawn[5])
    upper = np.triu_indices(n, 1)
    often = np.array([a[upper] for a in drawn]).mean(0)
    assert abs(often.mean() - 0.3) < 4 * (0.21 / (num * len(upper[0]))) ** 0.5
    assert often.std() < 1.5 * (0.21 / num) ** 0.5  # the same probability for every edge
    assert adjacency("erdos_renyi", n, probability=1.0).all()


def test_a_given_network_is_what_the_function_says_plus_loops():
    steps = [
        [[0, 1, 0], [0, 0, 0], [0, 0, 0]],
        np.array([[0, 0, 0], [0, 0, 1], [0, 0, 0]]),
        torch.tensor([[0, 0, 0], [0, 0, 0], [1.0, 0, 0]]),
    ]
    made = given_network(3, lambda step: steps[step % 3])
    links = made.between(3)
    for step in range(7):
        assert links.adjacency(step).nonzero().tolist() == sorted([[0, 0], [1, 1], [2, 2], [step % 3, (step + 1) % 3]])
    assert (links.directed, links.shares, links.doubly_stochastic, links.connected_within) == (
        True,
        "out_degree",
        False,
        3,
    )
    first = [[[0, 0], [0, 1], [1, 1], [2, 2]], [[0, 0], [1, 1], [1, 2], [2, 2]]]
    assert made.describe() == {"kind": "given", "directed": True, "shares": "auto", "first_steps": first}
    assert not made.faulty


def test_a_given_network_that_does_not_fit_is_refused():
    with pytest.raises(NetworkError, match="made for 3 peers, there are 4 clients: give one made for as many"):
        given_network(3, lambda _: np.eye(3)).between(4)
    with pytest.raises(NetworkError, match=r"a matrix of shape \(2, 3\) at step 5, expected \(3, 3\)"):
        given_network(3, lambda _: np.zeros((2, 3))).between(3).adjacency(5)
    one_way = np.triu(np.ones((3, 3)))
    with pytest.raises(NetworkError, match="said to be undirected but is not symmetric at step 2"):
        given_network(3, lambda _: one_way, directed=False).between(3).adjacency(2)
    with pytest.raises(NetworkError, match="no shares named 'fast': use auto, out_degree, metropolis or fastest"):
        given_network(3, lambda _: np.eye(3), directed=False, shares="fast").between(3)


def test_settings_that_make_no_network_are_refused():
    for name, value in (
        ("lowest", -0.1),
        ("lowest", 1.1),
        ("highest", 1.5),
        ("probability", 0.0),
        ("probability", 1.2),
        ("loss", 1.0),
        ("activity", 0.0),
    ):
        with pytest.raises(
            SettingError, match=f"Network: {name} is {value}, expected a value (at least|at most|greater than) "
        ):
            Network(**{name: value})
    with pytest.raises(SettingError, match="max_delay is -1, expected a value at least 0"):
        Network(max_delay=-1)
    with pytest.raises(SettingError, match="kind is 'star', expected 'complete' or 'ring'"):
        Network(kind="star")
    with pytest.raises(NetworkError, match=r"lowest probability of an edge is 0.7, above the highest, 0.6: swap them"):
        Network(lowest=0.7, highest=0.6)
    for bad in ({"kind": "file"}, {"kind": "ring", "file": "links.json"}):
        with pytest.raises(
            NetworkError,
            match="kind='file' needs the name of a file, and a file needs kind='file': give both or neither",
        ):
            Network(**bad)


def test_what_makes_a_network_faulty():
    assert not Network().faulty
    assert all(Network(**{name: value}).faulty for name, value in (("loss", 0.1), ("max_delay", 1), ("activity", 0.9)))


# ---- files ---------------------------------------------------------------------------------------


def written(tmp_path, content):
    path = tmp_path / "links.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return Network(kind="file", file=str(path))


def test_a_file_is_read_and_repeated_for_ever(tmp_path):
    links = written(tmp_path, {"num_peers": 3, "directed": True, "steps": [[[0, 1], [1, 2]], [[2, 0]]]}).between(3)
    for step in range(5):
        expected = [[0, 0], [1, 1], [2, 2], *([[0, 1], [1, 2]] if step % 2 == 0 else [[2, 0]])]
        assert links.adjacency(step).nonzero().tolist() == sorted(expected)
        assert torch.equal(links.mixing(step).adjacency, links.adjacency(step))
    assert (links.directed, links.shares, links.period, links.connected_within) == (True, "out_degree", 2, 2)
    assert written(tmp_path, {"num_peers": 2, "steps": [[[0, 1], [1, 0]]]}).between(2).directed  # unless said otherwise


def test_edges_of_an_undirected_file_go_both_ways(tmp_path):
    links = written(tmp_path, {"num_peers": 3, "directed": False, "steps": [[[0, 1], [2, 1]]]}).between(3)
    np.testing.assert_array_equal(links.adjacency(0).numpy(), [[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    assert (links.directed, links.shares, links.connected_within) == (False, "metropolis", 1)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"num_peers": 3, "steps": [[[0, 1]], [[0, 3]]]},
            r"step 1: the edge \[0, 3\] names the unknown peer 3; peers are numbered from 0 to 2",
        ),
        ({"num_peers": 3, "steps": [[[-1, 1]]]}, r"names the unknown peer -1"),
        ({"num_peers": 3, "steps": [[[0, 1, 2]]]}, r"step 0: \[0, 1, 2\] is no edge, expected \[sender, receiver\]"),
        ({"num_peers": 3, "steps": [[["0", 1]]]}, r"\['0', 1\] is no edge"),
        ({"num_peers": 3, "steps": [[[True, 0]]]}, r"\[True, 0\] is no edge"),
        ({"num_peers": 3, "steps": [[7]]}, r"step 0: 7 is no edge"),
        ({"num_peers": 4, "steps": [[[0, 1]]]}, r"is for 4 peers, there are 3 clients: write one for as many"),
        ({"num_peers": 3, "steps": []}, r"has no steps: give at least one list of edges"),
        ({"num_peers": 3}, r"is not of the form .*: KeyError 'steps'"),
        ({"num_peers": "3", "steps": [[]]}, r"is not of the form .*num_peers must be a whole number"),
        ({"num_peers": 3, "directed": "no", "steps": [[]]}, r"is not of the form .*directed true or false"),
        ({"num_peers": 3, "steps": [5]}, r"is not of the form .*steps a list of lists"),
        ([1, 2], r"is not of the form .*TypeError"),
        ("{not json", r"is not of the form .*JSONDecodeError"),
    ],
)
def test_a_file_that_holds_no_network_is_refused(tmp_path, content, sentence):
    with pytest.raises(NetworkError, match=sentence):
        written(tmp_path, content).between(3)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(NetworkError, match=r"none\.json cannot be read \(No such file or directory\): check its name"):
        Network(kind="file", file=str(tmp_path / "none.json")).between(3)


# ---- connectivity --------------------------------------------------------------------------------


def reachable(links):
    """Who can reach whom, by squaring."""
    reach = links | np.eye(len(links), dtype=bool)
    for _ in links:
        reach = (reach.astype(int) @ reach.astype(int)) > 0
    return reach


@given(st.integers(1, 6), st.integers(1, 4), st.floats(0.05, 0.4), st.integers(0, 10**6))
def test_connected_within_is_the_first_union_in_which_all_reach_all(n, period, density, seed):
    steps = np.random.default_rng(seed).random((period, n, n)) < density
    links = given_network(n, lambda step: steps[step % period]).between(n)
    unions = np.logical_or.accumulate(steps)
    connected = [k + 1 for k in range(period) if reachable(unions[k]).all()]
    graphs = [nx.is_strongly_connected(nx.from_numpy_array(union, create_using=nx.DiGraph)) for union in unions]
    assert connected == [k + 1 for k in range(period) if graphs[k]]
    if connected:
        assert links.connected_within == connected[0]
        return
    mutual = reachable(unions[-1]) & reachable(unions[-1]).T
    heart = max(range(n), key=lambda i: (mutual[i].sum(), -i))
    lost = ", ".join(str(i) for i in range(n) if not mutual[heart, i])
    with pytest.raises(
        NetworkError,
        match=f"never connects: over 100 steps, clients? {lost} cannot both reach the others and be reached by them",
    ):
        _ = links.connected_within


def test_a_network_that_never_connects_names_who_is_cut_off(tmp_path):
    pair = np.zeros((5, 5))
    pair[[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]] = 1
    with pytest.raises(
        NetworkError,
        match="over 100 steps, clients 3, 4 cannot both reach the others and be reached by them; add edges, or raise",
    ):
        _ = given_network(5, lambda _: pair, directed=False).between(5).connected_within
    sink = np.array([[0, 1, 1], [1, 0, 1], [0, 0, 0]])
    with pytest.raises(NetworkError, match="over 100 steps, client 2 cannot"):
        _ = given_network(3, lambda _: sink).between(3).connected_within
    with pytest.raises(NetworkError, match="over 2 steps, clients 2, 3 cannot"):
        _ = (
            written(tmp_path, {"num_peers": 4, "directed": False, "steps": [[[0, 1]], [[2, 3]]]})
            .between(4)
            .connected_within
        )
    with pytest.raises(NetworkError, match=r"over 100 steps, clients 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, \.\.\. cannot"):
        _ = Network(kind="random_undirected", lowest=0.0, highest=0.0).between(12).connected_within
    with pytest.raises(NetworkError, match="over 1 step, clients"):
        _ = Network(kind="erdos_renyi", probability=0.01).between(8).connected_within


@pytest.mark.parametrize(
    ("kind", "n", "within"),
    [("complete", 6, 1), ("ring", 7, 1), ("torus", 12, 1), ("exponential", 8, 1), ("exponential", 5, 1)],
)
def test_named_networks_connect(kind, n, within):
    assert Network(kind=kind).between(n).connected_within == within


def test_a_network_of_one_is_connected():
    assert all(Network(kind=kind).between(1).connected_within == 1 for kind in UNDIRECTED + DIRECTED)


# ---- matrices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 12])
@pytest.mark.parametrize("kind", UNDIRECTED + DIRECTED)
def test_by_out_degree_every_sender_divides_by_its_receivers(kind, n):
    links = Network(kind=kind, shares="out_degree").between(n)
    assert not links.doubly_stochastic
    for step in range(4):
        who = links.adjacency(step).numpy()
        expected = np.array([[who[j, i] / who[j].sum() for j in range(n)] for i in range(n)])
        np.testing.assert_allclose(links.mixing(step).matrix.numpy(), expected, rtol=1e-15, atol=0)
        np.testing.assert_allclose(links.mixing(step).matrix.numpy().sum(0), 1, rtol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shares", ["metropolis", "fastest"])
@pytest.mark.parametrize("kind", UNDIRECTED)
def test_symmetric_shares_sum_to_one_both_ways_and_keep_to_the_edges(kind, shares, n):
    links = Network(kind=kind, shares=shares, lowest=0.1, highest=0.5).between(
        n
    )  # some steps of the random ones leave islands
    assert links.doubly_stochastic
    for step in range(3 if kind == "random_undirected" else 1):
        matrix, who = links.mixing(step).matrix.numpy(), links.adjacency(step).numpy()
        np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_allclose(matrix.sum(0), 1, rtol=1e-14)
        assert matrix.min() >= -1e-12
        assert (matrix[~who] == 0).all()
        if shares == "metropolis":
            degree = who.sum(1) - 1
            for i, j in zip(*np.nonzero(who & ~np.eye(n, dtype=bool)), strict=True):
                assert matrix[i, j] == pytest.approx(1 / (1 + max(degree[i], degree[j])), rel=1e-15)


def test_auto_means_metropolis_on_undirected_networks_and_directed_ones_refuse_symmetric_shares():
    assert all(Network(kind=kind).between(4).shares == "metropolis" for kind in UNDIRECTED)
    assert all(Network(kind=kind).between(4).shares == "out_degree" for kind in DIRECTED)
    for kind in DIRECTED:
        for shares in ("metropolis", "fastest"):
            with pytest.raises(
                NetworkError, match=f"{shares} shares need an undirected network, this one is directed: use out_degree"
            ):
                Network(kind=kind, shares=shares).between(4)
    with pytest.raises(NetworkError, match="fastest shares need an undirected network"):
        given_network(2, lambda _: np.eye(2), shares="fastest").between(2)


@pytest.mark.parametrize("shares", ["metropolis", "fastest"])
def test_complete_mixes_at_once(shares):
    matrix = Network(kind="complete", shares=shares).between(7).mixing(0).matrix
    np.testing.assert_allclose(matrix.numpy(), np.full((7, 7), 1 / 7), rtol=1e-14)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 12])
def test_fastest_on_a_path_is_the_closed_form(n):
    """Boyd, Diaconis, Xiao: one half on every edge, cos(pi/n)."""
    path = with_loops(nx.path_graph(n))
    assert (
        math.cos(math.pi / n) - 1e-12
        <= second(fastest_mixing(path))
        <= math.cos(math.pi / n) + 2e-3
        < second(metropolis(path))
    )


@pytest.mark.parametrize(
    "graph",
    [nx.cycle_graph(5), nx.cycle_graph(9), nx.star_graph(5), nx.complete_bipartite_graph(2, 3), nx.petersen_graph()],
)
def test_fastest_where_all_edges_are_alike_is_the_best_single_share(graph):
    """On an edge-transitive graph all edges have the same optimal share.

    The problem is convex, so an optimum may be averaged over the symmetries of the graph."""
    laplacian = np.linalg.eigvalsh(nx.laplacian_matrix(graph).toarray().astype(float))
    share = min(2 / (laplacian[1] + laplacian[-1]), 1 / max(degree for _, degree in graph.degree))
    best = max(1 - share * laplacian[1], share * laplacian[-1] - 1)
    assert (
        best - 1e-12
        <= second(fastest_mixing(with_loops(graph)))
        <= best * 1.005
        < second(metropolis(with_loops(graph)))
    )


def searched(who, seed, num=4000):
    """Find the best second eigenvalue by a random walk over valid matrices.

    The step grows with success and shrinks with failure."""
    rng, n = np.random.default_rng(seed), len(who)
    heads, tails = np.nonzero(np.triu(who, 1))

    def value(edges):
        matrix = np.zeros((n, n))
        matrix[heads, tails] = edges
        matrix += matrix.T
        load = matrix.sum(1)
        return np.inf if load.max() > 1 else np.abs(np.linalg.eigvalsh(matrix + np.diag(1 - load) - 1 / n)).max()

    edges, length = np.asarray(metropolis(torch.from_numpy(who)))[heads, tails], 0.1
    least = value(edges)
    for _ in range(num):
        trial = np.abs(edges + length * rng.standard_normal(len(edges)) * (rng.random(len(edges)) < 0.5))
        found = value(trial)
        if found < least:
            edges, least, length = trial, found, 1.5 * length
        else:
            length = max(0.96 * length, 1e-4)
    return least


@pytest.mark.parametrize(("n", "density", "seed"), [(4, 0.6, 3), (5, 0.5, 1), (6, 0.5, 12), (7, 0.6, 8), (7, 0.6, 16)])
def test_fastest_is_not_beaten_by_random_search_nor_by_metropolis(n, density, seed):
    graph = nx.gnp_random_graph(n, density, seed=seed)
    assert nx.is_connected(graph)
    who = with_loops(graph)
    found = second(fastest_mixing(who))
    assert found <= 1.02 * searched(who.numpy(), seed)
    assert found < second(metropolis(who))


def test_fastest_mixes_every_island_by_itself():
    """A step of a random network may have islands; its second eigenvalue is then always 1."""
    graph = nx.disjoint_union_all([nx.path_graph(4), nx.empty_graph(1), nx.complete_graph(3)])
    order = np.random.default_rng(0).permutation(8)
    who = with_loops(graph)[order][:, order]
    matrix = fastest_mixing(who)
    back = np.argsort(order)
    blocks = matrix[back][:, back]
    assert second(blocks[:4, :4]) <= math.cos(math.pi / 4) + 2e-3
    assert float(blocks[4, 4]) == 1
    np.testing.assert_allclose(blocks[5:, 5:].numpy(), np.full((3, 3), 1 / 3), rtol=1e-14)
    assert bool((matrix[~who] == 0).all())


@given(st.integers(2, 8), st.floats(0.2, 0.9), st.integers(0, 10**6))
def test_fastest_is_valid_and_no_slower_than_metropolis_on_any_graph(n, density, seed):
    upper = np.triu(np.random.default_rng(seed).random((n, n)) < density, 1)
    who = torch.from_numpy(upper | upper.T | np.eye(n, dtype=bool))
    matrix = fastest_mixing(who, num_steps=60).numpy()
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(0), 1, rtol=1e-13)
    assert matrix.min() >= -1e-12
    assert (matrix[~who.numpy()] == 0).all()
    assert second(matrix) <= second(metropolis(who)) + 1e-12


# ---- one exchange --------------------------------------------------------------------------------


def close(got, expected, rows):
    return float((got - expected).abs().max() / rows.abs().max()) < 1e-15


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("random_directed", "auto"),
        ("exponential", "auto"),
        ("random_undirected", "out_degree"),
        ("torus", "metropolis"),
        ("ring", "fastest"),
    ],
)
def test_an_exchange_is_the_matrix_times_the_rows(kind, shares):
    links, rows = Network(kind=kind, shares=shares, seed=3).between(9), rows_of(9, 5)
    for step in range(4):
        mixing = links.mixing(step)
        assert close(mixing(rows), torch.from_numpy(mixing.matrix.numpy() @ rows.numpy()), rows)
        assert mixing(rows[:, :0]).shape == (9, 0)


def test_steps_of_the_network_are_not_mixed_up():
    links, rows = Network(kind="random_directed", seed=1).between(6), rows_of(6)
    for step in (3, 0, 3, 8):
        who = adjacency("random_directed", 6, step, seed=1)
        expected = torch.from_numpy((who / who.sum(1, keepdims=True)).T @ rows.numpy())
        assert close(links.mixing(step)(rows), expected, rows)


@pytest.mark.parametrize("shares", ["out_degree", "metropolis"])
def test_float32_messages_are_rounded_and_summed_in_float64(shares):
    """Large rows cancel, so float32 sums or unrounded messages would differ by more than a bit."""
    n = 42
    rows = torch.randn(n, 6, generator=torch.Generator().manual_seed(0)) * 1e6
    rows[n // 2 :] = -rows[: n // 2] + torch.randn(n // 2, 6, generator=torch.Generator().manual_seed(1))
    mixing = Network(kind="complete", shares=shares).between(n).mixing(0)
    send = mixing.send.numpy()
    receive = mixing.matrix.numpy() / send
    messages = (rows.numpy().astype(np.float64) * send[:, None]).astype(np.float32).astype(np.float64)
    expected = np.array([[math.fsum(receive[i] * messages[:, k]) for k in range(6)] for i in range(n)]).astype(
        np.float32
    )
    got = mixing(rows)
    assert got.dtype == torch.float32
    np.testing.assert_array_max_ulp(got.numpy(), expected, 1)
    in_float32 = (mixing.matrix.float() @ rows).numpy()
    assert np.abs(in_float32 - expected).max() > 1000 * np.spacing(np.abs(expected).max())


@pytest.mark.parametrize(
    ("kind", "n", "sparse"),
    [
        ("ring", 63, False),
        ("ring", 64, True),
        ("ring", 101, True),
        ("random_directed", 100, True),
        ("complete", 70, False),
    ],
)
def test_the_sparse_product_equals_the_dense_one(kind, n, sparse):
    links, rows = Network(kind=kind, lowest=0.01, highest=0.05).between(n), rows_of(n, 4)
    mixing = links.mixing(0)
    assert mixing._receive.is_sparse == sparse
    assert close(mixing(rows), mixing.matrix @ rows, rows)
    who = links.adjacency(0).numpy()
    if kind == "random_directed":
        assert len(set(who.sum(1))) > 3
        assert close(mixing(rows), torch.from_numpy((who / who.sum(1, keepdims=True)).T @ rows.numpy()), rows)


@pytest.mark.parametrize("n", [7, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kind", "shares"), [("ring", "metropolis"), ("ring", "out_degree"), ("exponential", "out_degree")]
)
def test_chunks_of_columns_equal_the_whole(monkeypatch, kind, shares, n, dtype):
    mixing, rows = Network(kind=kind, shares=shares).between(n).mixing(0), rows_of(n, 11, dtype=dtype)
    whole = mixing(rows)
    for cells in (1, n, 3 * n + 1, 11 * n):
        monkeypatch.setattr(mixing_module, "_CELLS", cells)
        torch.testing.assert_close(mixing(rows), whole, rtol=1e-15 if dtype == torch.float64 else 1e-7, atol=1e-15)


def summed(mixing, rows):
    """Compute one exchange by its definition, with every message rounded and exact sums.

    The sums are rounded to float64 and then to the dtype of the rows."""
    kind, send = rows.numpy().dtype, mixing.send.numpy()
    receive = mixing.matrix.numpy() / send
    messages = (rows.numpy().astype(np.float64) * send[:, None]).astype(kind).astype(np.float64)
    return np.array(
        [[math.fsum(receive[i] * messages[:, k]) for k in range(rows.shape[1])] for i in range(len(rows))]
    ).astype(kind)


@given(
    st.integers(64, 80),
    st.floats(0.0, 0.05),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 10**6),
)
def test_sparse_sums_are_those_of_the_definition_on_any_graph(n, density, directed, dtype, seed):
    drawn = np.random.default_rng(seed).random((n, n)) < density
    mixing = given_network(n, lambda _: drawn if directed else drawn | drawn.T, directed=directed).between(n).mixing(0)
    rows = rows_of(n, 3, seed, dtype)
    before = rows.clone()
    got, expected = mixing(rows), summed(mixing, rows)
    assert torch.equal(rows, before)
    if dtype == torch.float32:
        np.testing.assert_array_max_ulp(got.numpy(), expected, 1)
    assert float(np.abs(got.numpy() - expected).max()) <= (1e-15 if dtype == torch.float64 else 1.2e-7) * float(
        rows.abs().max()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_messages_added_in_the_type_of_the_rows_are_the_sum_in_float64_bit_for_bit(dtype):
    n, draw = 64, torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.randint(-30, 30, (n, 400), generator=draw, dtype=torch.float64)
    rows = (torch.randn(n, 400, generator=draw, dtype=torch.float64) * scales).to(dtype)
    rows[1, :200] = -rows[0, :200] * (1 + torch.randn(200, generator=draw, dtype=torch.float64) * 1e-7).to(
        dtype
    )  # and some that nearly cancel
    for step in range(6):
        mixing = Network(kind="exponential").between(n).mixing(step)
        assert mixing._partner is not None
        who = torch.from_numpy(adjacency("exponential", n, step)).double()
        assert torch.equal(mixing(rows), (who.T @ (rows.double() / 2).to(dtype).double()).to(dtype))
    assert len({tuple(Network(kind="exponential").between(n).mixing(step)._partner.tolist()) for step in range(6)}) == 6


def test_partners_are_found_exactly_where_everybody_adds_one_message_to_its_own():
    n, shift = 70, torch.roll(torch.eye(70), 3, 1)
    lost, twice, loops = shift.clone(), shift.clone(), shift.clone()
    lost[5] = 0
    twice[5, 9] = 1
    loops[5], loops[8, 8] = 0, 1
    for matrix, expected in ((shift, True), (shift.T, True), (lost, False), (twice, False), (loops, False)):
        mixing, rows = given_network(n, lambda _, matrix=matrix: matrix).between(n).mixing(0), rows_of(n, 2)
        assert (mixing._partner is not None) == expected
        assert close(mixing(rows), torch.from_numpy(summed(mixing, rows)), rows)
    assert (
        Mixing(shift.bool(), shift.T.double(), torch.ones(n, dtype=torch.float64))._partner is None
    )  # nobody keeps anything
    for kind, shares in (("ring", "out_degree"), ("ring", "metropolis"), ("torus", "metropolis")):
        assert Network(kind=kind, shares=shares).between(n).mixing(0)._partner is None


@pytest.mark.parametrize(
    ("kind", "shares"), [("ring", "metropolis"), ("ring", "out_degree"), ("exponential", "auto"), ("complete", "auto")]
)
def test_rows_may_be_written_where_the_caller_says(kind, shares):
    mixing, rows, place = (
        Network(kind=kind, shares=shares).between(66).mixing(0),
        rows_of(66, 5, dtype=torch.float32),
        torch.full((66, 5), float("nan")),
    )
    before = rows.clone()
    assert mixing(rows, into=place) is place
    assert torch.equal(place, mixing(rows))
    assert torch.equal(rows, before)


def test_messages_to_oneself_are_not_sent():
    mixing = Network(kind="ring").between(5).mixing(0)
    assert mixing.sent.tolist() == [[(i - j) % 5 in (1, 4) for j in range(5)] for i in range(5)]
    assert mixing.sent is mixing.sent
    assert bool(mixing.adjacency.diagonal().all())


@pytest.mark.parametrize("kind", RANDOM)
def test_steps_drawn_ahead_are_those_drawn_alone(kind, monkeypatch):
    n, asked, real = 5, [], Stream.first_bits

    def counting(self, purpose, ids, *, iterations, width):
        asked.append(len(iterations))
        return real(self, purpose, ids, iterations=iterations, width=width)

    monkeypatch.setattr(Stream, "first_bits", counting)
    links = Network(kind=kind, seed=3).between(n)
    order = [*range(40), 7, 7, 90, 91, 92, 3, 39, 40]
    got = [links.adjacency(step) for step in order]
    assert len(asked) < 16
    assert max(asked) == 16
    words = lambda purpose, step: (
        Stream(3).bits(purpose, torch.arange(n), iteration=step, call=0, steps=range(1), width=n)[:, 0].double() / 2**32
    )
    for step, links_now in zip(order, got, strict=True):
        edges = words("network/edges", step) < 0.4 + (0.8 - 0.4) * words("network/chances", 0)
        expected = edges if kind == "random_directed" else edges.triu(1) | edges.triu(1).T
        assert torch.equal(links_now, expected | torch.eye(n, dtype=torch.bool))


def test_renumbered_peers_get_the_same_rows():
    n = 6
    order, rows = torch.tensor([4, 2, 0, 5, 1, 3]), rows_of(n)
    who = Network(kind="random_directed", seed=7).between(n)
    renumbered = given_network(n, lambda step: who.adjacency(step)[order][:, order]).between(n)
    for step in range(3):
        assert close(renumbered.mixing(step)(rows[order]), who.mixing(step)(rows)[order], rows)
        place = order.argsort()
        assert close(renumbered.mixing(step)(rows[order])[place], who.mixing(step)(rows), rows)


def test_links_at_the_start_alone_do_not_pass():
    later = GivenNetwork(3, lambda step: torch.ones(3, 3) if step < 5 else torch.eye(3))
    with pytest.raises(NetworkError, match=r"over 100 steps from step 100, clients 1, 2 cannot both reach"):
        _ = later.between(3).connected_within


@pytest.mark.parametrize("shares", ["auto", "out_degree", "fastest"])
@pytest.mark.parametrize("kind", RANDOM)
def test_links_that_a_device_draws_are_those_of_the_host(kind, shares):
    if (kind, shares) == ("random_directed", "fastest"):
        pytest.skip("fastest shares need an undirected network")
    links = Network(kind=kind, shares=shares, seed=3).between(7)
    if shares == "fastest":
        assert links.there is None
        return
    found, receive, send = links.shares_there(links.there(torch.arange(7), torch.arange(40, 45)))
    for place, step in enumerate(range(40, 45)):
        mixing = links.mixing(step)
        assert torch.equal(found[place], mixing.adjacency)
        assert torch.equal(receive[place], mixing.received_shares())
        assert torch.equal(mixing.send, torch.ones(7).double() if send is None else send[place][:, 0])
    assert len({tuple(one.flatten().tolist()) for one in found}) == 5


def test_shares_of_a_stack_of_networks():
    stack = torch.stack([Network(kind="random_undirected").between(6).adjacency(step) for step in range(4)])
    for one, expected in zip(metropolis(stack), stack, strict=True):
        assert torch.equal(one, metropolis(expected))
