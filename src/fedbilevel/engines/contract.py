"""The contract of an engine, as a check that can be run on any engine.

The reference is a simulation of the same clients in this process. Draws are addressed, so an engine
that keeps the contract computes the same numbers wherever its clients are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fedbilevel.engines import simulate
from fedbilevel.engines.engine import Engine
from fedbilevel.errors import FedBilevelError
from fedbilevel.federation.algorithm import Algorithm, Kept, PeerAlgorithm, Sparse, Value
from fedbilevel.federation.host import Host
from fedbilevel.problem.client_data import Holdings
from fedbilevel.verdict import Check, Report

MEMBERS = sorted({*Engine.__annotations__, *(name for name in vars(Engine) if not name.startswith("_"))})
_NUM = 2  # outer iterations that are compared with the simulation
_NEAR = 1e-12  # relative: sums in another order
_WILD = 1e200  # factor of the step sizes: the second outer iteration overflows, also in float64
_HERE = ("held.", "ledger.")  # parts of a checkpoint that depend on which arrays participants still hold


def check_engine(engine: Engine, clients: Sequence[Holdings], *, show: bool = True) -> Report:
    """Check the behaviour of an engine that the loop and the algorithms rely on.

    The reference is a simulation of the same clients. With several ranks or peers, all of them make
    this call at the same time. The last check makes the engine diverge, so discard it afterwards.

    engine: a new engine, in float64, whose steps are short enough for three outer iterations.
    clients: the data of all clients, by number.
    show: print the report.

    >>> from fedbilevel.algorithms.fedbio import FedBiO
    >>> from fedbilevel.engines.simulation import Simulation
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> problem, clients = Quadratic().build()
    >>> check_engine(Simulation(FedBiO(), problem, clients, dtype=torch.float64), clients, show=False)
    <Engine Simulation, 5 clients: all 9 checks passed>
    """
    missing = [name for name in MEMBERS if not hasattr(engine, name)]
    checks = [Check("members", not missing, f"{len(MEMBERS) - len(missing)} of {len(MEMBERS)}{_listed(missing)}")]
    if not missing:
        exact = engine.dtype == torch.float64
        checks.append(Check("type", exact, f"{engine.dtype}, expected torch.float64 for this check"))
        if exact:
            checks += _Contract(engine, clients).checks()
    report = Report(f"Engine {type(engine).__name__}, {len(clients)} clients:", checks)
    if show and (missing or engine.group.rank == 0):
        print(report)
    return report


class _Contract:
    """The engine under check, its reference, and the progress of both."""

    def __init__(self, engine: Engine, clients: Sequence[Holdings]) -> None:
        self.engine, self.algorithm = engine, engine.algorithm
        options: dict[str, Any] = {
            "seed": engine.seed,
            "batch_size": engine.batch_size,
            "sampling": engine.sampling,
            "dtype": engine.dtype,
        }
        chosen = {name: getattr(engine, name) for name in ("cohort", "network", "averaging") if hasattr(engine, name)}
        self.reference = simulate(self.algorithm, engine.problem, clients, **options, **chosen)
        self.watched = _Watched(engine, Host(self.algorithm, engine.problem, clients, **options))
        self.peers = isinstance(self.algorithm, PeerAlgorithm)

    def checks(self) -> list[Check]:
        identity = self._identity()
        state, wanted = self._start(self.watched), self._start(self.reference)
        for iteration in range(1, _NUM + 1):
            state = self._advance(self.watched, state, iteration)
            wanted = self._advance(self.reference, wanted, iteration)
        followed = [self._trajectory(state, wanted), self._means(), self._bill(state), self._measured(state, wanted)]
        repeated, state = self._checkpoint(state)
        return [*followed, repeated, self._stable(identity), self._non_finite(state)]

    def _start(self, fed: Any) -> Any:
        fed.begin(0)
        return self.algorithm.init(fed)

    def _advance(self, fed: Any, state: Any, iteration: int, algorithm: Algorithm | None = None) -> Any:
        algorithm = algorithm or self.algorithm
        fed.begin(iteration, algorithm)
        state = algorithm.round(fed, state)
        fed.check()
        return state

    def _trajectory(self, state: Any, wanted: Any) -> Check:
        """Check that draws and sums agree, by the state after some outer iterations."""
        far, name = max((self._distance(value, getattr(wanted, name)), name) for name, value in _tensors(state))
        return Check(
            "trajectory", far < _NEAR, f"{name} differs from the simulation by {far:.1e} after {_NUM} iterations"
        )

    def _distance(self, value: Tensor, wanted: Tensor) -> float:
        if value.ndim == 2:
            wanted = wanted[[self.engine.client_of(row) for row in range(len(value))]]
        return _relative(value, wanted)

    def _means(self) -> Check:
        """Compare means with sums over the rows of all clients."""
        far = self.watched.far
        if not far:
            why = "peers have no server" if self.peers else "not all clients take part, or their values stay with them"
            return Check("means", True, f"none to compare: {why}")
        return Check(
            "means", max(far) < _NEAR, f"{len(far)} differ from the mean of all rows by at most {max(far):.1e}"
        )

    def _bill(self, state: Any) -> Check:
        """Compare the ledgers; a peer's ledger covers only the clients in its own process."""
        ours, theirs = self.engine.bill(), self.reference.bill()
        numbers = list(range(theirs.num_clients))
        if self.peers:
            numbers = [self.engine.client_of(row) for row in range(len(state.x))]
        other = [name for name, column in theirs.columns.items() if not _same(ours.columns[name], column, numbers)]
        other += ["rounds"] if ours.rounds != theirs.rounds else []
        return Check("bill", not other, f"{len(theirs.columns) + 1} columns as in the simulation{_listed(other)}")

    def _measured(self, state: Any, wanted: Any) -> Check:
        figures = {name: value for name, value in self.engine.measure(state.x, state.y).items() if _is_number(value)}
        expected = self.reference.measure(wanted.x, wanted.y)
        if self.peers and self.engine.num_clients > len(state.x):
            expected = {}  # a peer measures at its own point
        far = max([0.0, *(_apart(figures[name], value) for name, value in expected.items() if name in figures)])
        lacking = {"upper_loss", "lower_loss"} - figures.keys()
        text = f"{len(figures)} figures, at most {far:.1e} from the simulation{_listed(sorted(lacking))}"
        return Check("measure", not lacking and far < 1e-9, text)

    def _checkpoint(self, state: Any) -> tuple[Check, Any]:
        """Run one outer iteration twice from the same checkpoint; return the check and state.

        The second run follows a measurement, which must not change the result.
        """
        engine = self.engine
        engine.commit()
        tensors, plain = engine.state_dict(state)
        tensors, plain = {name: value.clone() for name, value in tensors.items()}, json.loads(json.dumps(plain))
        first = engine.state_dict(self._advance(engine, state, _NUM + 1))
        restored = engine.load_state_dict(engine.group.told_tensors(lambda: tensors), plain, self.algorithm.State)
        engine.measure(restored.x, restored.y)
        state = self._advance(engine, restored, _NUM + 1)
        again = engine.state_dict(state)
        names = [name for name in first[0] if not name.startswith(_HERE)]
        other = [name for name in names if name not in again[0] or not torch.equal(first[0][name], again[0][name])]
        other += [] if first[1] == again[1] else ["plain values"]
        text = f"{len(names)} tensors are the same bits when an iteration is repeated from a checkpoint{_listed(other)}"
        return Check("checkpoint", not other and first[0].keys() == again[0].keys(), text), state

    def _identity(self) -> Any:
        return json.loads(json.dumps(self.engine.identity()))

    def _stable(self, before: Any) -> Check:
        now = self._identity()
        other = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return Check(
            "identity", bool(now) and not other, f"{len(now)} facts that iterations leave as they are{_listed(other)}"
        )

    def _non_finite(self, state: Any) -> Check:
        """Check that steps that overflow raise an error in the phase, the mean or `check`."""
        wild = self.algorithm.scaled(_WILD)
        try:
            with self.engine.group.together():
                for iteration in range(_NUM + 2, _NUM + 5):
                    state = self._advance(self.engine, state, iteration, wild)
        except FedBilevelError as error:
            return Check("non-finite", True, f"raised {type(error).__name__}")
        return Check(
            "non-finite", False, "values that are not finite were returned, and check() did not raise an error"
        )


class _Watched:
    """Engine whose means are compared with means over the rows of all clients.

    `dense` computes the rows of all clients beside the engine.
    """

    def __init__(self, engine: Engine, dense: Host) -> None:
        self._engine, self._dense = engine, dense
        self._call = 0
        self.far: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def begin(self, iteration: int, algorithm: Algorithm | None = None) -> None:
        self._engine.begin(iteration, algorithm)
        self._dense.scratch.clear()
        self._iteration, self._call = iteration, 0

    def gather(self, phase: Callable[..., Any], /, **broadcast: Value) -> SimpleNamespace:
        self._call += 1
        fed: Any = self._engine
        rows: SimpleNamespace = fed.gather(phase, **broadcast)
        return rows

    def mean(self, phase: Callable[..., Any], /, **broadcast: Value) -> SimpleNamespace:
        self._call += 1
        fed: Any = self._engine
        means: SimpleNamespace = fed.mean(phase, **broadcast)
        kept = any(isinstance(value, Kept) for value in (*broadcast.values(), *vars(means).values()))
        if fed.cohort.size(fed.num_clients) < fed.num_clients or fed.cohort.replacement or kept:
            return means
        everybody = self._dense.data.positions
        answers = self._dense.run_phase(phase.__name__, broadcast, everybody, self._iteration, self._call)
        weights = self._dense.weights(everybody).double()
        for name, value in answers.items():
            rows = value.rows if isinstance(value, Sparse) else value
            if rows is not None:
                wanted = (weights[:, None] * rows.double()).sum(0) / weights.sum()
                self.far.append(_relative(getattr(means, name), wanted))
        return means


def _tensors(state: Any) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in state._asdict().items() if isinstance(value, Tensor)]


def _relative(value: Tensor, wanted: Tensor) -> float:
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    return (
        float((value - wanted).abs().max()) / max(scale, 1e-300)
        if value.numel() and scale
        else float(value.abs().sum())
    )


def _apart(value: float, wanted: float) -> float:
    return abs(value - wanted) / max(abs(wanted), 1.0)


def _same(one: Tensor, other: Tensor, numbers: list[int]) -> bool:
    return torch.equal(one[numbers], other[numbers])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _listed(names: Sequence[str]) -> str:
    return f"; not: {', '.join(names)}" if names else ""
