"""The clients of a phase: stores, local steps, addressed batches and charges.

A client alone gives the same results as a client among others."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.columns import COLUMNS
from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.federation.algorithm import ServerAlgorithm, phase
from fedbilevel.federation.clients import Bill, Clients
from fedbilevel.federation.host import Host
from fedbilevel.federation.store import Store, StoreView
from fedbilevel.settings import setting
from fedbilevel.tasks.quadratic import Quadratic

NUM = 4
TAUS = (3, 1, 5, 2)
TASK = Quadratic(num_clients=NUM, dim_upper=3, dim_lower=4, num_samples=3, bend=0.5)  # 3, 4, 5, 6 samples


@dataclass(frozen=True, kw_only=True)
class Probe(ServerAlgorithm):
    """Phases that show what a phase may do."""

    lr: float = setting(0.1, "step", above=0)

    upper_space = ("x", "h")
    lower_space = ("y", "u")

    @phase
    def gradient(self, clients, x, y):
        return {"q": clients.lower_grad(x, y, clients.batch("train", "q")), "nothing": None}

    @phase
    def lower_steps(self, clients, x, y):
        x, y = clients.rows(x, y)
        for step in clients.steps(TAUS):
            y = step.where(y - self.lr * clients.lower_grad(x, y, step.batch("train", "B_y")), y)
        return {"y": y}

    @phase
    def broken(self, clients, x, where):
        rows = clients.rows(x).clone()
        rows[clients.ids == where] = float("inf")
        return {"h": rows}

    @phase
    def misshapen(self, clients, x):
        return {"h": x}

    def not_a_phase(self, clients):
        return {}


def host(who=range(NUM), **options):
    """The clients numbered `who` of a federation of four."""
    built = TASK.build()
    return Host(
        Probe(),
        built.problem,
        [built.clients[i] for i in who],
        ids=list(who),
        num_clients=NUM,
        **{"dtype": torch.float64, "batch_size": 2, "seed": 5, **options},
    )


def cohort(home, *positions, iteration=3, call=2):
    return Clients(home, torch.tensor(positions, dtype=torch.int64), iteration, call)


def everyone(home, **address):
    return cohort(home, *range(len(home)), **address)


def rows(seed, num, dim=2):
    return torch.randn(num, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def charges(home, *columns):
    return {name: home.ledger.columns[name].tolist() for name in columns}


# ---- stores --------------------------------------------------------------------------------------


def test_reading_what_nobody_wrote_gives_the_default():
    default = rows(0, 2)
    assert torch.equal(StoreView(Store(3), torch.tensor([0, 2])).read("old", default=default), default)


def test_a_client_that_never_wrote_reads_its_default_and_the_others_what_they_wrote():
    store = Store(4)
    written, default = rows(0, 2), rows(1, 4)
    StoreView(store, torch.tensor([1, 3])).write(old=written)
    got = StoreView(store, torch.arange(4)).read("old", default=default)
    assert torch.equal(got, torch.stack([default[0], written[0], default[2], written[1]]))
    assert store.written["old"].tolist() == [False, True, False, True]
    assert torch.equal(
        StoreView(store, torch.tensor([0, 3])).read("old", default=default[:2]), torch.stack([default[0], written[1]])
    )


def test_a_default_may_be_a_view_of_one_vector():
    store = Store(3)
    StoreView(store, torch.tensor([1])).write(old=rows(0, 1))
    got = StoreView(store, torch.arange(3)).read("old", default=torch.ones(2, dtype=torch.float64).expand(3, -1))
    assert torch.equal(
        got, torch.stack([torch.ones(2, dtype=torch.float64), rows(0, 1)[0], torch.ones(2, dtype=torch.float64)])
    )


def test_writing_a_part_changes_neither_what_was_written_before_nor_what_was_read():
    store = Store(3)
    all_of_them, part = StoreView(store, torch.arange(3)), StoreView(store, torch.tensor([1]))
    first = rows(0, 3)
    copy = first.clone()
    all_of_them.write(old=first)
    part.write(old=rows(1, 1))
    assert torch.equal(first, copy)  # the phase may go on using what it wrote
    lent = all_of_them.read("old", default=first)
    kept = lent.clone()
    part.write(old=rows(2, 1))
    assert torch.equal(lent, kept)  # and what it read
    assert torch.equal(all_of_them.read("old", default=first), torch.stack([copy[0], rows(2, 1)[0], copy[2]]))


def test_a_part_is_written_in_place_when_nobody_holds_the_rows():
    store = Store(4)
    StoreView(store, torch.tensor([0])).write(old=rows(0, 1))
    StoreView(store, torch.tensor([1, 2])).write(old=rows(1, 2))
    place = store._shelves["old"].rows.data_ptr()
    StoreView(store, torch.tensor([0, 1])).read("old", default=rows(3, 2)).zero_()  # a part that was read is a copy
    StoreView(store, torch.tensor([2])).write(old=rows(2, 1))
    assert store._shelves["old"].rows.data_ptr() == place
    assert torch.equal(
        store.rows["old"],
        torch.stack([rows(0, 1)[0], rows(1, 2)[0], rows(2, 1)[0], torch.zeros(2, dtype=torch.float64)]),
    )
    StoreView(store, torch.arange(4)).write(old=rows(4, 4))
    StoreView(store, torch.tensor([1])).write(old=rows(5, 1))
    place = store._shelves["old"].rows.data_ptr()
    StoreView(store, torch.tensor([1, 3])).write(old=rows(6, 2))
    assert store._shelves["old"].rows.data_ptr() == place


@given(st.lists(st.tuples(st.sets(st.integers(0, 3)), st.integers(0, 10_000)), min_size=1, max_size=8))
def test_any_sequence_of_writes_leaves_each_clients_last_value_and_every_earlier_reading_alone(writes):
    store, last, seen = Store(4), {}, []
    for who, seed in writes:
        positions = torch.tensor(sorted(who), dtype=torch.int64)
        values = rows(seed, len(who))
        StoreView(store, positions).write(m=values)
        last.update(zip(sorted(who), values.clone(), strict=True))
        default = rows(seed + 1, 4)
        got = StoreView(store, torch.arange(4)).read("m", default=default)
        assert torch.equal(got, torch.stack([last.get(i, default[i]) for i in range(4)]))
        seen.append((got, got.clone()))
    assert all(torch.equal(got, then) for got, then in seen)


WRITES = st.lists(
    st.tuples(st.sets(st.integers(0, 5)), st.sampled_from(["rows", "one"]), st.integers(0, 10_000)),
    min_size=1,
    max_size=10,
)


@given(WRITES, st.sets(st.integers(0, 5), min_size=1))
def test_a_store_is_a_dictionary_of_rows(writes, asked):
    """Parts, everybody, and views of one vector; what was read or written before never changes."""
    store, model, seen, who = Store(6), {}, [], torch.tensor(sorted(asked))
    for whose, form, seed in writes:
        whose = sorted(whose)
        values = rows(seed, len(whose)) if form == "rows" else rows(seed, 1)[0].expand(len(whose), -1)
        seen.append((values, values.clone()))
        store.write("m", torch.tensor(whose, dtype=torch.int64), values)
        model.update(zip(whose, values.clone(), strict=True))
        default = rows(seed + 1, 6)
        for positions in (who, torch.arange(6)):
            got = store.read("m", positions, default[positions])
            assert torch.equal(got, torch.stack([model.get(i, default[i]) for i in positions.tolist()]))
            seen.append((got, got.clone()))
        assert store.written["m"].tolist() == [i in model for i in range(6)]
        assert torch.equal(
            store.rows["m"], torch.stack([model.get(i, torch.zeros(2, dtype=torch.float64)) for i in range(6)])
        )
        backwards = torch.tensor(sorted(model, reverse=True), dtype=torch.int64)
        own = store.own("m", backwards)
        assert torch.equal(own, torch.stack([model[i] for i in backwards.tolist()]) if model else own[:0])
        own.zero_()  # a copy
    assert all(torch.equal(got, then) for got, then in seen)


def test_only_those_who_have_written_take_memory():
    store, draw = Store(1000), torch.Generator().manual_seed(0)
    moved, place = 0, 0
    for k in range(12):
        store.write("m", torch.randperm(1000, generator=draw)[:10].sort().values, rows(k, 10))
        count, shelf = int(store.written["m"].sum()), store._shelves["m"].rows
        moved, place = moved + (shelf.data_ptr() != place), shelf.data_ptr()
        assert count <= len(shelf) <= 2 * count
    assert moved <= 5  # 10, 20, 40, 80, 160
    for k in range(300):
        store.write("m", torch.randperm(1000, generator=draw)[:40].sort().values, rows(k, 40))
    assert len(store._shelves["m"].rows) <= 1000


def test_views_of_one_vector_are_kept_as_one_vector():
    store, vector = Store(1000), rows(0, 1)[0]
    store.write("m", torch.arange(1000), vector.expand(1000, -1))
    vector.zero_()  # whose vector that was may go on with it
    vector = rows(0, 1)[0]
    everybody = store.read("m", torch.arange(1000), rows(1, 1000))
    assert everybody.stride(0) == 0
    assert torch.equal(everybody[7], vector)
    some = store.read("m", torch.tensor([3, 5]), rows(1, 2))
    assert some.is_contiguous()
    assert torch.equal(some, torch.stack([vector, vector]))
    store.write("m", torch.tensor([5]), rows(2, 1))
    assert len(store._shelves["m"].rows) == 1
    assert torch.equal(store.read("m", torch.tensor([3, 5]), rows(1, 2)), torch.stack([vector, rows(2, 1)[0]]))


def test_a_default_wider_than_what_was_written_widens_it():
    """An estimator that one number per client makes, read together with clients that are new."""
    store = Store(3)
    store.write("b", torch.tensor([1]), torch.tensor([[7.0]]))
    assert store.read("b", torch.arange(3), torch.zeros(3, 2)).tolist() == [[0, 0], [7, 7], [0, 0]]


def test_tuples_are_stored_entry_by_entry():
    store = Store(3)
    pair, default = (rows(0, 2), rows(1, 2, dim=5)), (rows(2, 3), rows(3, 3, dim=5))
    StoreView(store, torch.tensor([0, 2])).write(old=pair, other=rows(4, 2))
    got = StoreView(store, torch.arange(3)).read("old", default=default)
    assert isinstance(got, tuple)
    for part, written, fallback in zip(got, pair, default, strict=True):
        assert torch.equal(part, torch.stack([written[0], fallback[1], written[1]]))
    assert torch.equal(StoreView(store, torch.tensor([2])).read("other", default=rows(5, 1)), rows(4, 2)[1:])


def test_a_cleared_store_has_forgotten_everything():
    store = Store(2)
    view = StoreView(store, torch.arange(2))
    view.write(old=rows(0, 2))
    store.clear()
    assert torch.equal(view.read("old", default=rows(1, 2)), rows(1, 2))


def test_no_clients_read_and_write_nothing():
    store = Store(2)
    StoreView(store, torch.arange(2)).write(old=rows(0, 2))
    nobody = StoreView(store, torch.zeros(0, dtype=torch.int64))
    nobody.write(old=rows(1, 0))
    assert nobody.read("old", default=rows(1, 0)).shape == (0, 2)
    assert torch.equal(StoreView(store, torch.arange(2)).read("old", default=rows(3, 2)), rows(0, 2))


def test_memory_and_scratch_belong_to_the_clients_of_the_cohort():
    home = host()
    cohort(home, 1, 3).memory.write(m=rows(0, 2))
    cohort(home, 1, 3).scratch.write(m=rows(1, 2))
    later = everyone(home, iteration=4)
    default = rows(2, NUM)
    assert torch.equal(later.memory.read("m", default=default)[[1, 3]], rows(0, 2))
    assert torch.equal(later.scratch.read("m", default=default)[[1, 3]], rows(1, 2))
    assert torch.equal(later.memory.read("m", default=default)[[0, 2]], default[[0, 2]])


# ---- rows and steps ------------------------------------------------------------------------------


def test_rows_are_views_of_a_shared_vector_or_the_rows_themselves():
    some = cohort(host(), 0, 2)
    x, mine = torch.arange(3.0), rows(0, 2)
    spread, same = some.rows(x, mine)
    assert spread.shape == (2, 3)
    assert spread.data_ptr() == x.data_ptr()
    assert same is mine
    assert some.rows(x).shape == (2, 3)
    assert cohort(host()).rows(x).shape == (0, 3)


def test_steps_are_as_many_as_the_longest_client_of_the_cohort_takes():
    home = host()
    assert [step.index for step in everyone(home).steps(TAUS)] == [0, 1, 2, 3, 4]
    assert len(cohort(home, 0, 1).steps(TAUS)) == 3
    assert len(cohort(home).steps(TAUS)) == 5  # a process with none of the cohort goes through the same motions
    assert len(everyone(home).steps(2)) == 2
    with pytest.raises(SettingError, match="3 numbers of local steps for 4 clients"):
        everyone(home).steps((1, 2, 3))


def test_active_says_who_still_steps_and_where_keeps_the_others():
    steps = everyone(host()).steps(TAUS)
    new, old = rows(0, NUM), rows(1, NUM)
    for step in steps:
        active = torch.tensor(TAUS) > step.index
        assert step.active.tolist() == active.tolist()
        expected = torch.stack([new[i] if active[i] else old[i] for i in range(NUM)])
        assert torch.equal(step.where(new, old), expected)
        a, (b, c) = step.where((new, (old, new)), (old, (new, old)))
        assert torch.equal(a, expected)
        assert torch.equal(b, torch.where(active[:, None], old, new))
        assert torch.equal(c, expected)
        assert step.count.tolist() == [[float(tau)] for tau in TAUS]


def test_a_client_that_is_done_is_not_touched_by_what_is_not_finite():
    last = everyone(host()).steps(TAUS)[-1]
    kept = last.where(torch.full((NUM, 2), float("inf"), dtype=torch.float64), rows(0, NUM))
    assert torch.equal(kept[[0, 1, 3]], rows(0, NUM)[[0, 1, 3]])
    assert bool(kept[2].isinf().all())


def test_with_equal_numbers_of_steps_everybody_is_active():
    for step in [*everyone(host()).steps(3), *cohort(host(), 2).steps(TAUS)]:
        assert step.active is None
        assert step.where("new", "old") == "new"


# ---- batches -------------------------------------------------------------------------------------


def indices(clients, num_steps=20, **options):
    return torch.stack(
        [step.batch("train", "B_y", **options).fields["index"] for step in clients.steps(num_steps)], dim=1
    )


@pytest.mark.parametrize("options", [{}, {"times": 3}], ids=["plain", "three in one"])
def test_a_client_draws_the_same_samples_hosted_alone_or_with_others_and_in_any_cohort(options):
    together = indices(everyone(host()), **options)
    assert together.shape == (NUM, 20, 2 * options.get("times", 1))
    for i in range(NUM):
        assert torch.equal(indices(everyone(host([i])), **options)[0], together[i])
    assert torch.equal(indices(cohort(host(), 1, 3), **options), together[[1, 3]])
    assert torch.equal(indices(everyone(host([3, 0])), **options), together[[3, 0]])


def test_a_client_sees_the_same_samples_hosted_alone_or_with_others():
    together = everyone(host()).batch("val", "B_f")
    for i in range(NUM):
        alone = everyone(host([i])).batch("val", "B_f")
        for name, value in alone.fields.items():
            assert torch.equal(value[0], together.fields[name][i]), name


def test_the_samples_of_a_step_do_not_depend_on_how_many_steps_follow_or_how_long_others_step():
    home = host()
    long = indices(everyone(home), 20)
    assert torch.equal(indices(everyone(home), 3), long[:, :3])
    unequal = torch.stack(
        [step.batch("train", "B_y").fields["index"] for step in everyone(home).steps((20, 1, 3, 17))], dim=1
    )
    assert torch.equal(unequal, long)


def test_asking_out_of_order_or_twice_gives_the_same_samples():
    steps = everyone(host()).steps(40)
    backwards = [step.batch("train", "B_y").fields["index"] for step in reversed(steps)]
    assert torch.equal(torch.stack(backwards[::-1], dim=1), indices(everyone(host()), 40))
    assert steps[7].batch("train", "B_y") is steps[7].batch("train", "B_y")


def test_a_batch_outside_steps_is_that_of_the_first_step():
    clients = everyone(host())
    for options in ({}, {"times": 2}):
        first = clients.steps(4)[0].batch("val", "B_f", **options)
        assert torch.equal(clients.batch("val", "B_f", **options).fields["index"], first.fields["index"])


def test_purposes_roles_steps_phases_and_iterations_have_streams_of_their_own():
    home = host(batch_size=12)
    step = everyone(home).steps(2)[0]
    base = step.batch("train", "B_y").fields["index"]
    others = [
        step.batch("train", "B_g"),
        step.batch("val", "B_y"),
        everyone(home).steps(2)[1].batch("train", "B_y"),
        everyone(home, call=3).batch("train", "B_y"),
        everyone(home, iteration=4).batch("train", "B_y"),
        everyone(host(seed=6, batch_size=12)).batch("train", "B_y"),
    ]
    for other in others:
        assert (other.fields["index"] == base).double().mean() < 0.5


def test_samples_belong_to_their_client():
    batch = everyone(host(batch_size=50)).batch("train", "B_y")
    built = TASK.build()
    for i in range(NUM):
        index = batch.fields["index"][i]
        assert set(index.tolist()) == set(range(3 + i))  # all of its samples come up in fifty draws
        assert torch.equal(batch.fields["A"][i], torch.as_tensor(built.clients[i]["train"]["A"])[index])


def test_batch_sizes_by_role():
    clients = everyone(host(batch_size={"train": 3, "val": None}))
    assert clients.batch("train", "B").fields["index"].shape == (NUM, 3)
    assert clients.batch("val", "B").counts.tolist() == [3, 4, 5, 6]
    whole = everyone(host(batch_size=None)).steps(2)
    assert whole[0].batch("train", "B").counts.tolist() == [3, 4, 5, 6]


def test_batches_outside_local_steps_may_have_a_size_of_their_own():
    clients = everyone(host(batch_size={"train": 2, "outside": None}))
    assert clients.steps(3)[1].batch("train", "B").counts.tolist() == [2] * NUM
    assert clients.batch("train", "B").counts.tolist() == [3, 4, 5, 6]
    assert clients.batch("val", "B").counts.tolist() == [3, 4, 5, 6]
    four = everyone(host(batch_size={"train": 2, "outside": 4}))
    assert four.batch("train", "B").fields["index"].shape == (NUM, 4)
    assert four.steps(1)[0].batch("val", "B").counts.tolist() == [3, 4, 5, 6]


def test_by_epochs_local_steps_pass_through_all_samples_before_any_comes_again():
    home = host(batch_size=3, sampling="epochs")
    for i, row in enumerate(indices(everyone(home), 20)):
        size = 3 + i
        assert sorted(row.flatten()[:size].tolist()) == list(range(size))
        assert torch.bincount(row.flatten()).tolist() == pytest.approx([60 / size] * size, abs=1)
    assert torch.equal(
        indices(everyone(host([2, 0], batch_size=3, sampling="epochs")), 20), indices(everyone(home), 20)[[2, 0]]
    )


def test_an_unknown_way_of_sampling_is_refused():
    with pytest.raises(SettingError, match="sampling is 'epoch', expected 'replacement' or 'epochs'"):
        host(sampling="epoch")


@pytest.mark.parametrize("size", [0, -1, {"train": 0}])
def test_empty_batches_are_refused(size):
    with pytest.raises(SettingError, match=r"batch_size is .*, expected at least 1 sample"):
        host(batch_size=size)


def test_a_batch_size_for_a_role_that_no_client_has_is_refused():
    with pytest.raises(SettingError, match="trian"):
        host(batch_size={"trian": 8})


def test_draws_come_from_each_clients_own_stream():
    together = torch.stack([everyone(host()).draw("k", 7, step=s) for s in range(30)])
    assert together.shape == (30, NUM)
    assert (int(together.min()), int(together.max())) == (0, 6)
    for i in range(NUM):
        assert torch.equal(
            torch.stack([step.draw("k", 7) for step in everyone(host([i])).steps(30)])[:, 0], together[:, i]
        )
    assert len({tuple(together[:, i].tolist()) for i in range(NUM)}) == NUM
    assert cohort(host()).draw("k", 7).shape == (0,)


# ---- derivatives and their cost ------------------------------------------------------------------


def point(k):
    return rows(0, k, 3), rows(1, k, 4), rows(2, k, 4)


def test_clients_give_the_oracles_derivatives_and_charge_them():
    home = host()
    clients, (x, y, v) = cohort(home, 1, 3), point(2)
    train, val = clients.batch("train", "a"), clients.batch("val", "b")
    for method, args, columns in (
        ("lower_grad", (x, y, train), ("gy",)), ("lower_grad_x", (x, y, train), ("gx",)),
        ("upper_grad_x", (x, y, val), ("fx",)), ("upper_grad_y", (x, y, val), ("fy",)),
        ("upper_grads", (x, y, val), ("fx", "fy")), ("jacobian_product", (x, y, v, train), ("jvp",)),
        ("hessian_product", (x, y, v, train), ("hvp",)), ("second_order", (x, y, v, train), ("jvp", "hvp")),
    ):  # fmt: skip
        before = {name: column.clone() for name, column in home.ledger.columns.items()}
        got = getattr(clients, method)(*args)
        torch.testing.assert_close(got, getattr(home.oracle, method)(*args), rtol=0, atol=0)
        paid = {name: (column - before[name]).tolist() for name, column in home.ledger.columns.items()}
        expected = (
            {name: [0, 0, 0, 0] for name in COLUMNS}
            | {name: [0, 1, 0, 1] for name in columns}
            | {"samples": [0, 2, 0, 2]}
        )
        assert paid == expected, method


def test_directions_charge_each_batch_once_and_every_derivative():
    home = host()
    clients, (x, y, u) = cohort(home, 1, 3), point(2)
    gy, ju, hu = (clients.batch("train", purpose) for purpose in "abc")
    fx, fy = (clients.batch("val", purpose) for purpose in "de")
    got = clients.directions(x, y, u, gy=gy, fx=fx, fy=fy, ju=ju, hu=hu)
    torch.testing.assert_close(got, home.oracle.directions(x, y, u, gy=gy, fx=fx, fy=fy, ju=ju, hu=hu), rtol=0, atol=0)
    assert charges(home, "samples") == {"samples": [0, 10, 0, 10]}
    assert all(paid == [0, 1, 0, 1] for paid in charges(home, "gy", "fx", "fy", "jvp", "hvp").values())
    clients.directions(x, y, u, gy=gy, fx=fx, fy=fx, ju=gy, hu=gy)
    assert charges(home, "samples") == {"samples": [0, 14, 0, 14]}
    assert all(paid == [0, 2, 0, 2] for paid in charges(home, "gy", "fx", "fy", "jvp", "hvp").values())


@pytest.mark.parametrize("batch_size", [2, None])
def test_only_clients_that_still_step_are_charged(batch_size):
    home = host(batch_size=batch_size)
    home.run_phase("lower_steps", {"x": home.x0, "y": home.y0}, torch.arange(NUM), 1, 1)
    sizes = [batch_size or 3 + i for i in range(NUM)]
    assert charges(home, "gy", "samples") == {
        "gy": list(TAUS),
        "samples": [tau * size for tau, size in zip(TAUS, sizes, strict=True)],
    }


@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_unequal_local_steps_take_every_client_where_it_would_go_alone(batch_size, strategy):
    home = host(batch_size=batch_size, strategy=strategy)
    x = rows(0, 1, 3)[0]
    together = home.run_phase("lower_steps", {"x": x, "y": home.y0}, torch.arange(NUM), 1, 1)["y"]
    paid = {name: torch.zeros(NUM, dtype=torch.int64) for name in COLUMNS}
    for i in range(NUM):
        alone = host([i], batch_size=batch_size, strategy=strategy)
        y = alone.run_phase("lower_steps", {"x": x, "y": alone.y0}, torch.arange(1), 1, 1)["y"][0]
        torch.testing.assert_close(
            together[i], y, rtol=0 if strategy == "loop" else 1e-12, atol=0 if strategy == "loop" else 1e-13
        )
        paid = {name: paid[name] + alone.ledger.columns[name] for name in COLUMNS}
    assert {name: column.tolist() for name, column in paid.items()} == charges(home, *COLUMNS)
    assert not torch.allclose(together[0], together[3])


def test_local_steps_follow_the_written_out_recursion():
    home = host(batch_size=None)
    x = rows(0, 1, 3)[0]
    got = home.run_phase("lower_steps", {"x": x, "y": home.y0}, torch.arange(NUM), 1, 1)["y"]
    for i, client in enumerate(TASK.build().clients):
        A, B, c = (torch.as_tensor(client["train"][name]).mean(0) for name in "ABc")
        y = torch.zeros(4, dtype=torch.float64)
        for _ in range(TAUS[i]):
            y = y - 0.1 * (A @ y - B @ x - c + 0.5 * torch.tanh(y))
        torch.testing.assert_close(got[i], y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("batch_size", [2, None])
def test_fused_directions_cost_a_client_the_same_alone_and_with_others(batch_size):
    def paid(home):
        clients = everyone(home)
        x, y, u = clients.rows(home.x0, home.y0, home.y0)
        for step in clients.steps(TAUS):
            train, val = (
                (lambda purpose, step=step: step.batch("train", purpose)),
                (lambda purpose, step=step: step.batch("val", purpose)),
            )
            clients.directions(
                x, y, u, gy=train("B_y"), fx=val("B_f1"), fy=val("B_f2"), ju=train("B_g1"), hu=train("B_g2")
            )
        return torch.stack([home.ledger.columns[name] for name in COLUMNS])

    assert torch.equal(
        paid(host(batch_size=batch_size)), sum(paid(host([i], batch_size=batch_size)) for i in range(NUM))
    )


def test_nobody_is_charged_when_nobody_takes_part():
    home = host()
    clients = cohort(home)
    x, y, v = point(0)
    train, val = clients.batch("train", "a"), clients.batch("val", "b")
    assert clients.lower_grad(x, y, train).shape == (0, 4)
    assert [part.shape for part in clients.directions(x, y, v, gy=train, fx=val, fy=val, ju=train, hu=train)] == [
        (0, 3),
        (0, 4),
        (0, 4),
    ]
    assert all(int(column.sum()) == 0 for column in home.ledger.columns.values())


# ---- running a phase -----------------------------------------------------------------------------


def test_a_phase_runs_by_name_and_may_return_nothing_under_a_name():
    home = host()
    result = home.run_phase("gradient", {"x": home.x0, "y": home.y0}, torch.tensor([0, 2]), 1, 1)
    batch = cohort(home, 0, 2, iteration=1, call=1).batch("train", "q")
    torch.testing.assert_close(result["q"], home.oracle.lower_grad(home.x0, home.y0, batch), rtol=0, atol=0)
    assert result["nothing"] is None


@pytest.mark.parametrize("name", ["absent", "not_a_phase", "init"])
def test_only_phases_can_be_asked_for(name):
    with pytest.raises(ValueError, match=f"has no phase named '{name}'"):
        host().run_phase(name, {}, torch.arange(NUM), 1, 1)


def test_a_value_that_is_not_finite_is_named_with_its_client():
    home = host([3, 1, 2])
    with pytest.raises(
        NonFiniteError,
        match=r"client 1 returned a value of 'h' that is not finite in phase 'broken' of outer iteration 6",
    ):
        home.run_phase("broken", {"x": home.x0, "where": 1}, torch.arange(3), 6, 1)
    home.run_phase("broken", {"x": home.x0, "where": 0}, torch.arange(3), 6, 1)


def test_a_phase_must_return_one_row_per_client():
    home = host()
    with pytest.raises(
        ValueError, match=r"phase 'misshapen' returned 'h' of shape \(3,\) for 4 clients: one row per client is needed"
    ):
        home.run_phase("misshapen", {"x": home.x0}, torch.arange(NUM), 1, 1)


def test_width_is_that_of_the_space_a_name_is_declared_in():
    home = host()
    assert [home.width(name) for name in ("x", "h", "y", "u")] == [3, 3, 4, 4]
    with pytest.raises(KeyError, match="declares 'z' neither in upper_space nor in lower_space"):
        home.width("z")


def test_two_gradients_at_one_point_are_charged_twice_and_computed_once(monkeypatch):
    home = host(batch_size=3)
    asked = []
    original = home.oracle.lower_grad
    monkeypatch.setattr(home.oracle, "lower_grad", lambda *given, **more: asked.append(1) or original(*given, **more))
    clients = Clients(home, torch.arange(NUM), 1, 1, None, Bill())
    x, y = home.x0, home.y0.clone()
    step, later = clients.steps(2)
    batch = step.batch("train", "B")
    first = clients.lower_grad(x, y, batch)
    assert clients.lower_grad(x, clients.rows(y), batch) is first
    assert (len(asked), clients.bill.calls["gy"], clients.bill.calls["samples"]) == (1, 2, 6)
    for other in ((x, y.clone(), batch), (x, y, later.batch("train", "B")), (x, clients.rows(y) + 0, batch)):
        clients.lower_grad(*other)
    assert len(asked) == 4
    clients.lower_grad(x, y, batch)
    y += 1
    assert not torch.equal(clients.lower_grad(x, y, batch), first)
    assert len(asked) == 6
