"""The one way to run an algorithm from Python: `solve`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedbilevel import discovery
from fedbilevel.aggregation.attacks import Attack
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.engines import group_of, simulate
from fedbilevel.engines.distributed import TIMEOUT
from fedbilevel.engines.ranks import EngineName, Group
from fedbilevel.errors import ProblemWarning, SettingError, UnknownNameError
from fedbilevel.federation.algorithm import Algorithm, Cohort, PeerAlgorithm, ServerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.clients import BatchSize, Sampling
from fedbilevel.federation.network import AnyNetwork
from fedbilevel.federation.schedule import Schedule
from fedbilevel.federation.stragglers import Stragglers
from fedbilevel.oracle.oracle import Strategy
from fedbilevel.oracle.precision import Precision
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.data_faults import outside_named
from fedbilevel.problem.holdings import check_clients
from fedbilevel.problem.problem import Problem
from fedbilevel.problem.validation import check_kind
from fedbilevel.runs.baseline import Point, check_unseen, compared, plain_run, with_unseen
from fedbilevel.runs.callbacks import Callback, Follower
from fedbilevel.runs.choice import choose
from fedbilevel.runs.faults import warn_of_faults
from fedbilevel.runs.loop import Loop, configuration
from fedbilevel.runs.options import torch_device
from fedbilevel.runs.pace import checked_pace
from fedbilevel.runs.privacy_account import attach, forecast, planned
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Result
from fedbilevel.runs.step_sizes import measured_steps


def solve(  # one explicit keyword per option, so that help() and editors show them all
    problem: Problem,
    clients: Sequence[Holdings],
    algorithm: Algorithm | str = "auto",
    *,
    num_rounds: int | None = None,
    num_iterations: int | None = None,
    seed: int = 0,
    batch_size: BatchSize = None,
    sampling: Sampling = "replacement",
    schedule: Schedule = Schedule(),
    cohort: Cohort = Cohort(),
    stragglers: Stragglers = Stragglers(),
    network: AnyNetwork | None = None,
    averaging: Averaging | None = None,
    aggregation: Aggregation | None = None,
    attack: Attack | None = None,
    measure_every: int | None = None,
    measure_growth: float = 0.0,
    residuals: bool = True,
    stationarity: bool = False,
    record: Path | str | None = None,
    resume: bool = False,
    checkpoint_every: int = 10,
    callbacks: Sequence[Callback] = (),
    recover: bool = True,
    baseline: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    precision: Precision = "full",
    strategy: Strategy = "auto",
    chunk_size: int | None = None,
    engine: EngineName = "simulation",
    timeout: float = TIMEOUT,
    drops: Callable[[int, int], Collection[int]] | None = None,
    ids: Sequence[int] | None = None,
    describe: Mapping[str, Any] | None = None,
    run_file: str | None = None,
    **settings: Any,
) -> Result:
    """Minimise the upper loss over x, with y at the minimum of the lower loss, across all clients.

    algorithm: "auto" chooses one without step sizes to tune and prints its choice: `self_tuned`, or
        `hgp` if network or averaging is given. Otherwise a name (`fedbilevel list` shows all), with
        its settings as further keywords, such as lr_upper=0.1; or an instance, such as
        FedBiO(lr_upper=0.1). A step size of "auto" is measured in a few rounds before the first
        outer iteration; `Result.steps` has its value.

    Length; without both, the run ends when its figures no longer change, or after 500 rounds.
        num_rounds: end at the first outer iteration that reaches this number of rounds.
        num_iterations: end after this number of outer iterations.

    Randomness and data.
        seed: seed of everything that the run draws. The same seed gives the same run on any engine.
        batch_size: samples per minibatch, one number or one per role, {"train": 64, "val": None}.
            None: all samples of the client.
        sampling: "replacement" samples with replacement; "epochs" passes through shuffled data.
        schedule: Schedule(power, offset, end) lets step sizes fall over the outer iterations.

    Participation.
        cohort: Cohort(fraction) lets a part of the clients take part in a round (with a server).
        stragglers: Stragglers(slow, work, dropout) makes clients slow or silent (with a server).
        network, averaging: links between peers and the kind of average (without a server).
        aggregation: Aggregation(clip, compress, robust, noise, secure) treats the rows that clients
            send; between peers, compress and robust in averages of kind gossip.
        attack: Attack(kind, share) makes a share of the clients attack (with a server).

    Measurements.
        measure_every: outer iterations between measurements. None: about twenty in the run.
        measure_growth: 0.05 lets this distance grow to a twentieth of the iterations done.
        residuals: also measure how far y and u are from solving their equations.
        stationarity: also measure the norm of the hypergradient (slow: hundreds of products each).

    Records.
        record: a folder for the configuration, measurements, checkpoints and the solution.
        resume: continue from the last checkpoint in that folder.
        checkpoint_every: outer iterations between checkpoints.
        callbacks: functions of a `Progress`, called after every outer iteration (with an attribute
            `skips = True`, after some of them where a GPU runs several at once); a callback that
            returns True stops the run.
        describe: further entries of the recorded configuration, as plain JSON values.
        run_file: the run as TOML text, kept in the record.

    Failures.
        recover: when a loss or a residual grows far beyond its best value, or a value is not finite,
            return to the best state with halved steps, with a warning, at most three times; then end
            as failed with the best state. False: raise an error at the first non-finite value.

    Comparison.
        baseline: also train y with x fixed at x0 for as many rounds, and compare both solutions on
            data that no run used (`Result.baseline`): by metrics of roles other than train and val
            or, without such roles, by the upper loss on a quarter of the samples in val, which is
            then held out of both runs.

    Computing.
        device, dtype: "cpu", "cuda" or "cuda:1", and the type of x and y.
        precision: "bf16" or "fp16" evaluates the losses of derivatives in bfloat16 or float16; x, y,
            their derivatives, sums and measurements stay in float32.
        strategy, chunk_size: how clients are evaluated together; by default, a measurement decides.
            With "loop" and a chunk_size, so many clients work at a time, which saves memory. On a CPU,
            clients with long rows work one at a time by default.
        engine: "simulation", or "distributed" under torchrun, where every rank makes the same call.
            All ranks return the result; rank 0 writes the record and calls the callbacks.
        timeout: seconds after which a silent rank counts as lost.
        drops: a function (outer iteration, call) -> clients that do not answer, for tests.
        ids: numbers of the clients, if they are not 0, 1, 2, ...

    Ctrl-C finishes the outer iteration, saves a checkpoint in the record, if there is one, and returns.
    A second Ctrl-C stops the run at once.

    >>> import torch
    >>> import fedbilevel as fb
    >>> def squared(y, batch):
    ...     return (batch["a"] @ y["w"] - batch["b"]) ** 2  # one loss per sample
    >>> problem = fb.Problem(
    ...     upper=lambda x, y, batch: squared(y, batch),
    ...     lower=lambda x, y, batch: squared(y, batch) + (x["log_penalty"].exp() * y["w"] ** 2).sum(),
    ...     x0={"log_penalty": torch.zeros(2)},
    ...     y0={"w": torch.zeros(2)},
    ... )
    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> data = [{"a": a, "b": a @ torch.tensor([1.0 + i, -1.0])} for i in range(3)]
    >>> clients = [{"train": one, "val": one} for one in data]
    >>> fb.solve(problem, clients, num_rounds=50)
    <self_tuned: 49 outer iterations, 50 rounds, 0.0629 MB; upper_loss 1.2..., lower_loss 1..., lower_gradient ...>
    """
    choice = None
    if isinstance(algorithm, str):
        choice = choose(algorithm, between_peers=network is not None or averaging is not None)
        for name in settings:
            if other := choice.other_owner(name):
                raise SettingError(
                    f"{choice.name}, which auto chose, has no setting {name!r}: leave it out, or name an algorithm "
                    f"that has it, e.g. solve(problem, clients, {other!r}, {name}=...)."
                )
        algorithm, settings = choice.name, {**choice.settings, **settings}
    chosen = _algorithm(algorithm, settings)
    check_kind(problem)
    _check_types(cohort, schedule, network, averaging, callbacks, describe, record, drops, stragglers)
    for label, given, owner in (("aggregation", aggregation, Aggregation), ("attack", attack, Attack)):
        if not isinstance(given, owner | None):
            raise SettingError(f"{label} is {given!r:.80}, expected {owner.__name__}(...), or None.")
    check_clients(clients)
    chosen = stragglers.checked().slowed(chosen, len(clients), seed)
    pace = checked_pace(
        num_iterations, num_rounds, measure_every, measure_growth, checkpoint_every, residuals, stationarity
    )
    if resume and record is None:
        raise SettingError("resume needs a record: give the folder of the run to resume.")
    for label, flag in (("recover", recover), ("baseline", baseline)):
        if not isinstance(flag, bool):
            raise SettingError(f"{label} is {flag!r}, expected True or False.")
    if baseline and engine != "simulation":
        raise SettingError(
            f"baseline=True needs all clients in one process, and the engine is {engine!r}: leave baseline out, or "
            "use the engine 'simulation'."
        )
    if baseline:
        clients, describe = with_unseen(problem, clients, seed, ids), {**(describe or {}), "baseline": True}
    for warning in chosen.check_scopes(problem.scopes):
        warnings.warn(warning, stacklevel=2)
    place = torch_device(device)
    group = group_of(engine, place, timeout)
    if choice is not None and group.rank == 0:
        choice.say()
    with group.together(), outside_named(clients):
        options = {
            "seed": seed, "batch_size": batch_size, "sampling": sampling, "dtype": dtype, "group": group,
            "precision": precision,
            "device": group.device(place), "strategy": strategy, "chunk_size": chunk_size, "ids": ids,
        }  # fmt: skip
        fed = simulate(
            chosen, problem, clients, cohort=cohort, network=network, averaging=averaging, drops=drops,
            stragglers=stragglers, aggregation=aggregation, attack=attack, **options,
        )  # fmt: skip
        if baseline:
            check_unseen(fed.host)
        if group.size == 1:
            warn_of_faults(fed.host, chosen.learns_x and not chosen.one_level)
        if fed.account is not None:
            attach(fed.account, None if record is None else Path(record), group)
            if aggregation is not None and aggregation.noise is not None and group.rank == 0:
                few = planned(aggregation, chosen, problem, clients, **{**options, "ids": None, "group": Group()})
                done = Record(record).load()[1]["iteration"] if resume and record is not None else 0
                print(forecast(fed.account, few, pace, done), file=sys.stderr)
        kept = record is not None or any(isinstance(callback, Follower) for callback in callbacks)
        loop = Loop(
            chosen,
            fed,
            Record(record) if record is not None else None,
            configuration(fed, pace, schedule, engine=group.engine, describe=describe, identified=kept),
            pace,
            schedule,
            callbacks,
            overview=fed.overview,
            more_figures=[one for one, on in ((fed.residuals, residuals), (fed.stationarity, stationarity)) if on],
            run_file=run_file,
            measure_steps=(lambda: _without_server(chosen, problem, clients, options))
            if isinstance(chosen, PeerAlgorithm)
            else None,
            recover=recover,
            explained=lambda: outside_named(clients),
        )
    with group.together():
        result = loop.go(resume=resume)
    if not baseline or not chosen.learns_x or result.stopped in ("failed", "interrupted") or result.iteration == 0:
        return result
    own: dict[str, Any] = {"cohort": cohort, "stragglers": stragglers._replace(slow=0.0)}
    own = own if isinstance(chosen, ServerAlgorithm) else {}
    return _with_baseline(
        result, problem, clients, chosen, seed=seed, batch_size=batch_size, sampling=sampling, schedule=schedule,
        device=device, dtype=dtype, precision=precision, strategy=strategy, chunk_size=chunk_size, drops=drops,
        ids=ids, **own,
    )  # fmt: skip


def _with_baseline(
    result: Result, problem: Problem, clients: Sequence[Holdings], algorithm: Algorithm, **options: Any
) -> Result:
    """Add the comparison with the plain run of as many rounds; Ctrl-C skips it."""
    rounds = result.ledger["rounds"] if isinstance(algorithm, ServerAlgorithm) else result.iteration
    own = {**options, "num_rounds": rounds, "measure_every": max(1, rounds // 4), "residuals": False}
    with warnings.catch_warnings():  # the run has already warned of them
        warnings.simplefilter("ignore", ProblemWarning)
        warnings.filterwarnings("ignore", ".* cannot be evaluated for several clients at once")
        warnings.filterwarnings("ignore", "the fused kernels of attention")
        plain = solve(problem, clients, plain_run(), **own)
    if plain.stopped == "interrupted":
        return result
    learned, fixed = (Point(one.x, one.y) for one in (result, plain))
    chosen = {name: options[name] for name in ("seed", "dtype")}
    found = compared(problem, clients, learned, fixed, plain.ledger, **chosen)
    if result.path is not None:
        Record(result.path).write_baseline(found.asdict())
    return dataclasses.replace(result, baseline=found)


def _without_server(
    chosen: Algorithm, problem: Problem, clients: Sequence[Holdings], options: Mapping[str, Any]
) -> dict[str, float]:
    """Return step sizes of "auto" for peers, measured as with a server: a simulation has all data."""
    steps = chosen.auto_steps(measured_steps(problem, clients, **options))
    return {name: steps[name] for name in chosen.auto_names()}


_OPTIONS = [name for name, one in inspect.signature(solve).parameters.items() if one.kind is one.KEYWORD_ONLY]


def _algorithm(given: Any, settings: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm, from an instance, or from a name and settings."""
    kind = discovery.algorithm(given) if isinstance(given, str) else type(given)
    if not isinstance(given, str | ServerAlgorithm | PeerAlgorithm):
        raise SettingError(
            f"algorithm is {given!r:.80}, expected a name such as 'fedbio', "
            "or an algorithm with its settings, e.g. FedBiO(lr_upper=0.01)."
        )
    fields = {spec.name for spec in dataclasses.fields(kind)}
    for name in settings:
        if name not in fields:
            raise UnknownNameError(f"option of solve() or setting of {kind.name()}", name, [*_OPTIONS, *fields])
    if isinstance(given, str):
        return kind(**settings)
    if settings:
        raise SettingError(
            f"{', '.join(sorted(settings))} would change an algorithm that already has its settings: "
            "give the algorithm by name, or put the settings into it."
        )
    return given


def _check_types(
    cohort: Any, schedule: Any, network: Any, averaging: Any, callbacks: Any, describe: Any, record: Any, drops: Any,
    stragglers: Any,
) -> None:  # fmt: skip
    kinds = (("cohort", cohort, Cohort), ("schedule", schedule, Schedule), ("stragglers", stragglers, Stragglers))
    for label, given, kind in kinds:
        if not isinstance(given, kind):
            raise SettingError(f"{label} is {given!r}, expected a {kind.__name__}, e.g. {kind()!r}.")
    if not isinstance(network, AnyNetwork | None) or not isinstance(averaging, Averaging | None):
        raise SettingError(
            f"network is {network!r} and averaging {averaging!r}, expected e.g. Network(kind='ring') and "
            "Averaging(num_steps=20), or None."
        )
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise SettingError(f"callbacks is {callbacks!r:.80}, expected a list of functions that take a Progress.")
    if not isinstance(describe, Mapping | None):
        raise SettingError(f"describe is {describe!r:.80}, expected a dict to add to the recorded configuration.")
    try:
        json.dumps(describe)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"describe cannot be written as JSON ({error}): use plain numbers, strings, lists and dicts."
        ) from error
    if record is not None and (not isinstance(record, str | Path) or not str(record)):
        raise SettingError(f"record is {record!r}, expected the name of a folder, or None.")
    if drops is not None and not callable(drops):
        raise SettingError(
            f"drops is {drops!r}, expected a function (outer iteration, call) that returns the clients "
            "that do not answer."
        )
