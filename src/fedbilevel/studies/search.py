"""Search of step sizes and other settings for any problem or task: `tune`."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedbilevel.columns import falls
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Algorithm, Cohort, PeerAlgorithm, ServerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import AnyNetwork
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.settings import whole_number
from fedbilevel.studies.compare import named
from fedbilevel.studies.ranges import Range, Scales, given_ranges, measured, steps_of
from fedbilevel.studies.trial_runs import FIRST_REPETITION, SearchPlan, TrialRuns
from fedbilevel.studies.tuned import Search, SearchTrial, Tuned, listed
from fedbilevel.tasks.task import Built, Task

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from fedbilevel.studies.journal import Journal, Study

_ONE_RUN = ("record", "resume", "callbacks", "run_file", "describe")  # options that trials cannot share


def tune(  # one explicit keyword per option, so that help() and editors show them all
    task: Task | Problem,
    algorithms: str | Sequence[str] | Mapping[str, Algorithm],
    *,
    clients: Sequence[Holdings] | None = None,
    metric: str = "upper_loss",
    num_rounds: int = 200,
    num_trials: int = 30,
    repetitions: int = 1,
    ranges: Mapping[str, Any] | None = None,
    storage: Path | str | None = None,
    prune: bool = True,
    seed: int = 0,
    jobs: int = 1,
    progress: Callable[[str], None] | None = None,
    cohort: Cohort = Cohort(),
    network: AnyNetwork | None = None,
    averaging: Averaging | None = None,
    **options: Any,
) -> Tuned:
    """Search the settings of one or several algorithms, with equal budgets.

    task: a task; or a problem, with its clients.
    algorithms: names, or a dict from names to algorithms with their settings. Settings that are not
        searched stay as given; for a name, as the task suggests.
    metric: the figure to improve. The default is the upper loss, which is a validation loss. Figures
        of test data would make the later test optimistic.
    num_rounds: rounds of communication of one run. A trial is judged by the mean of the metric over
        the last quarter of them.
    num_trials: trials of each algorithm.
    repetitions: runs of one trial, on data and draws from repetition 100 on, which no comparison
        reports. A problem has the same clients in each.
    ranges: {"lr_upper": (0.01, 10)} for all algorithms, or {"fedbio": {"lr_upper": (0.01, 10)}} for
        one. A tuple holds the ends of a range on a logarithmic scale, a list the values to try. By
        default every step size is searched: of y and u from 0.01 to 10 times 1/L, of x from 0.003
        to 30 times |x| / |hypergradient|, both measured once.
    storage: a folder for the trials, in Optuna's journal.log. The same call resumes the search, and
        several processes may work on one folder. `optuna-dashboard FOLDER/journal.log` shows it.
    prune: stop a run that, after a third of its rounds, is worse than three quarters of the complete
        trials were at the same round.
    seed: seed of the search; repetition r has the run seed `seed + r`.
    jobs: trials of a task that run at the same time, each in its own process. For a problem, start
        your script several times with the same storage.
    progress: a function that receives one line of text per trial.
    cohort, network, averaging: as in `compare`.
    options: further keywords of `solve`, such as batch_size.

    A trial that diverges is the worst, not an error. Needs Optuna: pip install 'fedbilevel[tune]'.

    >>> import fedbilevel as fb
    >>> task = fb.tasks.Quadratic(num_clients=3)
    >>> found = fb.tune(task, ["fedbio", "simfbo"], num_trials=3, num_rounds=20)
    >>> [(name, len(one.trials)) for name, one in found.searches.items()]
    [('fedbio', 3), ('simfbo', 3)]
    >>> compared = fb.compare(task, found.algorithms, num_rounds=20, repetitions=1)
    """
    if find_spec("optuna") is None:
        raise SettingError("tune needs Optuna, which is not installed: pip install 'fedbilevel[tune]'.")
    between_peers = network is not None or averaging is not None
    starts, jobs = _starts(algorithms, task, between_peers), whole_number("jobs", jobs, 1)
    if jobs > 1 and not isinstance(task, Task):
        raise SettingError("jobs needs a task: for a problem, start your script several times with the same storage.")
    more = {"cohort": cohort, "network": network, "averaging": averaging, **options}
    plan = SearchPlan(
        _built(task, clients, whole_number("repetitions", repetitions, 1)),
        _metric(metric),
        whole_number("num_rounds", num_rounds, 1),
        whole_number("num_trials", num_trials, 1),
        prune,
        whole_number("seed", seed),
        progress or (lambda _: None),
        {"cohort": cohort},
        {"network": network, "averaging": averaging},
        _options(options, metric),
    )
    about = {
        "task": task.name() if isinstance(task, Task) else task.name,
        "task_settings": task.asdict() if isinstance(task, Task) else {},
        "repetitions": repetitions,
        **plan.about(),
    }
    from fedbilevel.studies.journal import Journal  # needs an extra

    with ExitStack() as stack:
        folder = _folder(storage)
        if folder is None and jobs > 1:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        journal = Journal(folder)
        scales, studies = _studies(plan, journal, starts, given_ranges(ranges, starts), about, isinstance(task, Task))
        if jobs > 1:
            call = {"metric": metric, "num_rounds": num_rounds, "num_trials": num_trials, "repetitions": repetitions}
            call |= {"ranges": ranges, "storage": folder, "prune": prune, "seed": seed, **more}
            _side_by_side(plan, studies, jobs, (task, starts), call)
        else:
            with journal.working():
                for name, start in starts.items():
                    _work(plan, start, studies[name])
        searches = {name: _search(start, studies[name], plan.metric) for name, start in starts.items()}
    return Tuned(plan.metric, plan.num_rounds, searches, scales)


def _studies(
    plan: SearchPlan,
    journal: Journal,
    starts: Mapping[str, Algorithm],
    given: Mapping[str, Mapping[str, Range]],
    about: Mapping[str, Any],
    suggested: bool,
) -> tuple[Scales | None, dict[str, Study]]:
    """Open one study per algorithm; measure the scales of the steps if a new study needs them."""
    from optuna.pruners import BasePruner, NopPruner, PercentilePruner  # an extra

    pruner: BasePruner = NopPruner()
    if plan.prune:  # only complete trials count, so that the median would soon be the median of the best
        pruner = PercentilePruner(75.0, n_startup_trials=5, n_warmup_steps=plan.num_rounds // 3, n_min_trials=5)
    scales: Scales | None = None
    studies = {}
    for name, start in starts.items():
        ranges = dict(given[name])
        settings = {key: value for key, value in start.asdict().items() if key not in ranges}
        mine = {
            **about,
            "settings": {k: str(v) for k, v in settings.items()},
            "given": {k: str(v) for k, v in ranges.items()},
        }
        missing = [step for step in steps_of(type(start)) if step not in ranges]
        known = journal.known(name, mine)
        if known is not None:
            ranges = known
        elif missing:
            if scales is None:
                plan.say("measuring the scales of the steps")
                scales = measured(*plan.built[0], plan.options)
            ranges |= {step: scales.around(step, getattr(start, step) if suggested else None) for step in missing}
        if not ranges:
            raise SettingError(f"{name} has no step size to search: give ranges, e.g. {{'num_local_steps': [1, 5]}}.")
        first = {key: _first(one, getattr(start, key), suggested) for key, one in ranges.items()}
        studies[name] = journal.study(
            name, mine, ranges, first, falls=falls(plan.metric), seed=plan.seed, pruner=pruner
        )
    return scales, studies


def _first(one: Range, start: Any, suggested: bool) -> Any:
    """Return the value of the first trial: the suggested value if it is in the range, else a middle."""
    if isinstance(one, list):
        return start if start in one else one[0]
    low, high = one
    if suggested and isinstance(start, int | float) and low <= start <= high:
        return start
    middle = math.sqrt(low * high)
    return round(middle) if isinstance(low, int) and isinstance(high, int) else middle


def _work(plan: SearchPlan, start: Algorithm, study: Study) -> None:
    """Run trials until the study has enough; other processes may run trials, too."""
    while (trial := study.ask(plan.num_trials)) is not None:
        try:
            runs = TrialRuns(plan, trial)
            runs.go(dataclasses.replace(start, **_rounded(trial.params)))
        except KeyboardInterrupt:
            study.give_up(trial.number, trial.params)
            raise
        except BaseException:
            study.fail(trial.number)
            raise
        ended = study.tell(trial, runs.value, pruned=runs.outcome == "pruned")
        plan.say(_line(plan, study, _trial(ended)))


def _line(plan: SearchPlan, study: Study, trial: SearchTrial) -> str:
    end = f"{plan.metric} {trial.value:.4g}" if trial.outcome == "complete" else trial.outcome
    where = f"{study.name}: trial {trial.number + 1} of {plan.num_trials}"
    return f"{where}, {listed(trial.settings)}: {end} after {trial.rounds} rounds"


def _side_by_side(
    plan: SearchPlan, studies: Mapping[str, Study], jobs: int, what: tuple[Any, ...], call: Mapping[str, Any]
) -> None:
    """Let several processes make the same call of `tune`, and report the trials in their journal."""
    threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // jobs))  # more than cores are slower
    said = {(name, trial.number) for name, study in studies.items() for trial in study.ended()}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads,)) as pool:
        running = {pool.submit(tune, *what, **call) for _ in range(jobs)}
        while running:
            done, running = wait(running, timeout=1)
            for name, study in studies.items():
                for trial in study.ended():
                    if (name, trial.number) not in said:
                        said.add((name, trial.number))
                        plan.say(_line(plan, study, _trial(trial)))
            for one in done:
                try:
                    one.result()
                except BrokenProcessPool:
                    raise SettingError(
                        "a process of the search ended without a message, perhaps for lack of memory; the same call "
                        "resumes the search: use fewer jobs."
                    ) from None


def _search(start: Algorithm, study: Study, metric: str) -> Search:
    trials = [_trial(one) for one in study.ended()]
    ended = [trial for trial in trials if trial.outcome == "complete"]
    better = min if falls(metric) else max
    best = better(ended, key=lambda trial: trial.value) if ended else None
    algorithm = dataclasses.replace(start, **best.settings) if best is not None else None
    return Search(study.name, algorithm, best, trials, study.ranges)


def _trial(one: FrozenTrial) -> SearchTrial:
    about = one.user_attrs
    value = math.nan if one.value is None else one.value
    return SearchTrial(
        one.number, _rounded(one.params), value, about["outcome"], int(about["rounds"]), float(about["seconds"])
    )


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Round to three digits, which are enough for a step size and short enough for a report."""
    return {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in values.items()}


# ---- checks of what the user gives -----------------------------------------------------------------------------------


def _starts(given: Any, task: Any, between_peers: bool) -> dict[str, Algorithm]:
    """Return the algorithms with the settings that are not searched."""
    given = named([given] if isinstance(given, str) else given, task, between_peers=between_peers)
    if not isinstance(given, Mapping) or not all(
        isinstance(one, ServerAlgorithm | PeerAlgorithm) for one in given.values()
    ):
        raise SettingError(
            f"algorithms is {given!r:.80}, expected a name, a list of names, or a dict of algorithms with their "
            "settings by name, e.g. {'fedbio': FedBiO(num_local_steps=1)}."
        )
    if not given:
        raise SettingError("there are no algorithms to tune: name at least one.")
    return dict(given)


def _built(task: Any, clients: Any, repetitions: int) -> list[Built]:
    if isinstance(task, Task):
        if clients is not None:
            raise SettingError("a task makes its own clients: omit clients, or give a problem.")
        return [task.repeated(FIRST_REPETITION + r).build() for r in range(repetitions)]
    if not isinstance(task, Problem):
        raise SettingError(f"task is {task!r:.80}, expected a task with its settings, or a problem and its clients.")
    if clients is None:
        raise SettingError("a problem needs its data: give clients=[...] as for solve.")
    return [Built(task, clients)] * repetitions


def _metric(metric: Any) -> str:
    if not isinstance(metric, str) or not metric:
        raise SettingError(f"metric is {metric!r:.80}, expected the name of a figure, e.g. 'upper_loss'.")
    if "test" in metric:
        warnings.warn(
            f"settings are chosen by {metric!r}, so this figure of the tuned algorithms is optimistic: "
            "choose by a figure of validation data, e.g. 'upper_loss'.",
            stacklevel=3,
        )
    return metric


def _options(options: dict[str, Any], metric: str) -> dict[str, Any]:
    """Check the further keywords of `solve`, and leave out measurements that no trial needs."""
    for name in _ONE_RUN:
        if name in options:
            raise SettingError(f"{name} is an option of a single run, but a search makes many: omit it.")
    needed = {"residuals": metric in ("residual", "lower_gradient"), "stationarity": metric == "hypergradient"}
    return {**needed, "recover": False, **options}  # a trial is judged by its own steps, not by halved ones


def _folder(storage: Any) -> Path | None:
    if storage is None:
        return None
    if not isinstance(storage, str | Path) or not str(storage):
        raise SettingError(f"storage is {storage!r:.80}, expected the name of a folder, or None.")
    return Path(storage)
