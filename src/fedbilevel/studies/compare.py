"""Comparison of algorithms on the same data with the same seeds.

A comparison reports the cost of reaching a target, and the final figures.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel import discovery
from fedbilevel.errors import CheckpointError, NonFiniteError, SettingError
from fedbilevel.federation.algorithm import Algorithm, Cohort, PeerAlgorithm, ServerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import AnyNetwork
from fedbilevel.runs.baseline import unseen_roles
from fedbilevel.runs.choice import choose
from fedbilevel.runs.endings import whole
from fedbilevel.runs.record import finite, make_folder, write_whole
from fedbilevel.runs.result import Progress
from fedbilevel.runs.resume import versions
from fedbilevel.runs.solve import solve
from fedbilevel.settings import whole_number
from fedbilevel.studies.comparison import Comparison, Target, outcome
from fedbilevel.studies.rivals import run_rival
from fedbilevel.tasks.rival import Rival
from fedbilevel.tasks.task import Built, Task

FIXED = "x fixed at x0"  # name of the baseline


def compare(  # one explicit keyword per option, so that help() and editors show them all
    task: Task,
    algorithms: Mapping[str, Algorithm] | Sequence[str],
    *,
    num_iterations: int | Mapping[str, int] | None = None,
    num_rounds: int | None = None,
    target: Target | str | None = None,
    repetitions: int = 3,
    seed: int = 0,
    record: Path | str | None = None,
    progress: Callable[[str, int, Progress], None] | None = None,
    cohort: Cohort = Cohort(),
    network: AnyNetwork | None = None,
    averaging: Averaging | None = None,
    baseline: bool | None = None,
    rivals: bool = True,
    **options: Any,
) -> Comparison:
    """Run several algorithms on the same data with the same seeds.

    algorithms: a list of names, for which the task suggests the settings; or a dict from names to
        algorithms with their settings. "auto" is the algorithm that `solve` would choose, and the
        outcome has its name.
    num_iterations: outer iterations, one number for all or one per name; by default, the task
        suggests them.
    num_rounds: end every run at the first outer iteration that reaches this number of rounds.
    target: a figure to reach, e.g. "test_accuracy=0.94".
    repetitions: repetition r uses the run seed `seed + r` and the task's data seed `data_seed + r`.
    record: a folder, in which comparison.json is written after every run.
    cohort: cohort of algorithms with a server.
    network, averaging: network and averages of algorithms between peers.
    baseline: also train y with x fixed at x0, once per repetition, as the outcome "x fixed at x0";
        by default, if the task has test data and FedAvg is not one of the algorithms. The run is
        FedAvg with the task's settings and as many rounds as the longest of the others.
    rivals: also run the task's rivals, the plain ways to the same end, as outcomes of their names;
        every run of a rival has as many rounds as the longest of the algorithms, its costs include
        all runs by which it was tuned, and `chosen` in `Comparison.runs` names the chosen one.
    options: further keywords of `solve`.

    A run that diverges is recorded as diverged and has not reached the target.

    >>> import fedbilevel as fb
    >>> task = fb.tasks.Quadratic(num_clients=3)
    >>> found = fb.compare(task, ["fedbio", "fedavg"], num_rounds=5, repetitions=2)
    >>> [(one.name, one.num_runs, one.total["rounds"].mean) for one in found.outcomes]
    [('fedbio', 2, 5.0), ('fedavg', 2, 5.0)]
    """
    if not isinstance(task, Task):
        raise SettingError(f"task is {task!r:.80}, expected a task with its settings, e.g. Quadratic(num_clients=5).")
    methods = named(algorithms, task, between_peers=network is not None or averaging is not None)
    _check_algorithms(methods)
    repetitions, seed = whole_number("repetitions", repetitions, 1), whole_number("seed", seed)
    iterations = _iterations(num_iterations, methods, task, num_rounds)
    target = Target.parse(target) if isinstance(target, str) else target
    if not isinstance(target, Target | None):
        raise SettingError(f"target is {target!r:.80}, expected METRIC=VALUE, e.g. 'test_accuracy=0.94', or a Target.")
    if not callable(progress) and progress is not None:
        raise SettingError(
            f"progress is {progress!r:.80}, expected a function of (name, repetition, Progress), or None."
        )
    shown = {"cohort": cohort, "network": network, "averaging": averaging, **options}
    about = {
        "task_settings": task.asdict(),
        "seed": seed,
        "repetitions": repetitions,
        "num_iterations": iterations,
        "num_rounds": num_rounds,
        "options": {name: str(value) for name, value in shown.items()},
        "versions": versions(),
    }
    if baseline not in (None, True, False):
        raise SettingError(f"baseline is {baseline!r:.80}, expected True, False or None.")
    if not isinstance(rivals, bool):
        raise SettingError(f"rivals is {rivals!r:.80}, expected True or False.")
    book = _Book(_folder(record), task, target, [*methods], about)
    for r in range(repetitions):
        same = task.repeated(r)
        built = same.build()
        for name, algorithm in methods.items():
            peers = isinstance(algorithm, PeerAlgorithm)
            where = {"network": network, "averaging": averaging} if peers else {"cohort": cohort}
            given = {"num_iterations": iterations[name], "num_rounds": num_rounds, "seed": seed + r, **where, **options}
            tell = None if progress is None else functools.partial(progress, name, r)
            rows, diverged = _one(built, algorithm, target, tell, given)
            book.add(name, r, algorithm.asdict(), rows, diverged)
        rounds = book.longest(r)
        for name, rival in same.with_built(built).rivals().items() if rivals and rounds else ():
            own = {"num_rounds": rounds, "seed": seed + r, "cohort": cohort, **options}
            _add_rival(book, r, name if name not in methods else f"{name} (rival)", rival, target, progress, own)
        if baseline or (baseline is None and "fedavg" not in methods and unseen_roles(built.problem)):
            _add_baseline(book, r, built, target, progress, {"seed": seed + r, "cohort": cohort, **options}, rounds)
    return book.comparison()


def _add_baseline(
    book: _Book,
    r: int,
    built: Built,
    target: Target | None,
    progress: Callable[[str, int, Progress], None] | None,
    options: Mapping[str, Any],
    rounds: int,
) -> None:
    """Run FedAvg with x fixed at x0, for as many rounds as the longest run of the repetition."""
    [plain] = named(["fedavg"], book.task).values()
    if rounds:
        tell = None if progress is None else functools.partial(progress, FIXED, r)
        rows, diverged = _one(built, plain, target, tell, {"num_rounds": rounds, **options})
        book.add(FIXED, r, plain.asdict(), rows, diverged)


def _add_rival(
    book: _Book,
    r: int,
    name: str,
    rival: Rival,
    target: Target | None,
    progress: Callable[[str, int, Progress], None] | None,
    options: Mapping[str, Any],
) -> None:
    tell = () if progress is None else (functools.partial(progress, name, r),)
    found = run_rival(rival, callbacks=tell, **options)
    if target is not None and found.rows:
        target.check(found.rows[0])
    given = {
        key: one if isinstance(one, bool | int | float | str) else str(one) for key, one in found.way.settings.items()
    }
    settings = {"rival": rival.title, "algorithm": found.way.algorithm, **given}
    book.add(name, r, settings, found.rows, found.failed, chosen=found.chosen)


def _one(
    built: Built,
    algorithm: Algorithm,
    target: Target | None,
    tell: Callable[[Progress], None] | None,
    options: Mapping[str, Any],
) -> tuple[list[Mapping[str, Any]], str | None]:
    """Return the measurements of one run, and the reason of its divergence or None."""
    rows: list[Mapping[str, Any]] = []

    def watch(now: Progress) -> None:
        if now.row is not None:
            rows.append(now.row)
            if target is not None:
                target.check(now.row)
        if tell is not None:
            tell(now)

    try:
        result = whole(solve(built.problem, built.clients, algorithm, callbacks=[watch], **options))
    except NonFiniteError as error:
        return rows, str(error)
    return list(result.rows), result.ending.why if result.stopped == "failed" else None


def _folder(record: Path | str | None) -> Path | None:
    if record is None:
        return None
    if not isinstance(record, str | Path) or not str(record):
        raise SettingError(f"record is {record!r:.80}, expected the name of a folder, or None.")
    if (Path(record) / "comparison.json").exists():
        raise CheckpointError(f"{record} already holds a comparison: name another folder.")
    make_folder(Path(record))
    return Path(record)


@dataclasses.dataclass
class _Book:
    """The completed runs, written to comparison.json after every run."""

    folder: Path | None
    task: Task
    target: Target | None
    names: list[str]
    about: dict[str, Any]
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def comparison(self) -> Comparison:
        done = {one["algorithm"] for one in self.runs}
        outcomes = [outcome(name, self.runs, self.target) for name in self.names if name in done]
        return Comparison(self.task.name(), self.target, outcomes, self.runs)

    def longest(self, r: int) -> int:
        """Return the rounds of the longest run of a repetition."""
        return max(
            (one["rows"][-1]["rounds"] for one in self.runs if one["repetition"] == r and one["rows"]), default=0
        )

    def add(
        self,
        name: str,
        r: int,
        settings: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        diverged: str | None,
        **more: Any,
    ) -> None:
        """Add a run; `more` are facts that may differ between repetitions of the same settings."""
        self.names += [name] if name not in self.names else []
        self.runs.append(
            {"algorithm": name, "repetition": r, "settings": settings, "rows": rows, "diverged": diverged, **more}
        )
        if self.folder is not None:
            target = self.target._asdict() if self.target is not None else None
            content = {**self.about, **dataclasses.asdict(self.comparison()), "target": target}
            text = json.dumps(finite(content), indent=1, allow_nan=False) + "\n"
            write_whole(self.folder / "comparison.json", text.encode())


def named(given: Any, task: Any, *, between_peers: bool = False) -> Any:
    """Replace a list of names by algorithms with the settings that the task, if it is one, suggests."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(isinstance(name, str) for name in given):
        return given
    found: dict[str, Algorithm] = {}
    for name in given:
        choice = choose(name, between_peers=between_peers)
        choice.say()
        kind = discovery.algorithm(choice.name)
        suggested = task.suggestions(choice.name) if isinstance(task, Task) else {}
        own = {key: value for key, value in suggested.items() if key in kind.__dataclass_fields__}
        found[choice.name] = kind(**{**own, **choice.settings})
    return found


def _check_algorithms(algorithms: Any) -> None:
    example = "e.g. {'fedbio': FedBiO(lr_upper=0.01)}"
    if not isinstance(algorithms, Mapping) or not all(isinstance(name, str) for name in algorithms):
        raise SettingError(
            f"algorithms is {algorithms!r:.80}, expected a list of names, or a dict of algorithms with their "
            f"settings by name, {example}."
        )
    if not algorithms:
        raise SettingError("there are no algorithms to compare: name at least one.")
    for name, algorithm in algorithms.items():
        if not isinstance(algorithm, ServerAlgorithm | PeerAlgorithm):
            raise SettingError(
                f"the algorithm {name!r} is {algorithm!r:.80}, expected an algorithm with its settings, {example}."
            )


def _iterations(given: Any, algorithms: Mapping[str, Algorithm], task: Task, rounds: Any) -> dict[str, int]:
    """Return the outer iterations by name, at most one per round."""
    if rounds is not None:
        rounds = whole_number("num_rounds", rounds, 1)
    given = rounds if given is None else given
    if given is None:
        return {name: task.iterations(algorithm.name()) for name, algorithm in algorithms.items()}
    if not isinstance(given, Mapping):
        return dict.fromkeys(algorithms, whole_number("num_iterations", given, 0, ", or a dict of such by algorithm"))
    for name in algorithms:
        if name not in given:
            raise SettingError(
                f"num_iterations has no entry for {name!r}: give one number for all, or one for each of "
                f"{', '.join(algorithms)}."
            )
    return {name: whole_number(f"num_iterations of {name!r}", given[name], 0) for name in algorithms}
