"""Trials of a search in Optuna's journal, which several processes may extend at the same time.

    FOLDER/journal.log    one study per algorithm; `optuna-dashboard FOLDER/journal.log` opens it
    FOLDER/asking.lock    held while a process asks for a trial, so that no process exceeds the
                          number of trials
    FOLDER/workers/       one file per process, locked while the process lives; the unfinished trial
                          of a dead process is repeated

Import this module only where Optuna is installed.
"""

from __future__ import annotations

import fcntl
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from fedbilevel.errors import CheckpointError
from fedbilevel.runs.record import make_folder
from fedbilevel.studies.ranges import Range

FILE = "journal.log"
_RANDOM = 8  # trials before the sampler uses the results of others
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


class SeededByNumber(BaseSampler):
    """A tree-structured Parzen estimator whose draws depend on the seed and the trial's number.

    A sampler with one stream of draws would repeat its first trials in a resumed search, and in
    every further process.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._inner = seed, TPESampler(seed=seed)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        number = np.random.SeedSequence([abs(self._seed), trial.number]).generate_state(1)[0]
        self._inner = TPESampler(seed=int(number), n_startup_trials=_RANDOM)
        self._inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._inner.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._inner.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._inner.sample_independent(study, trial, param_name, param_distribution)


class Journal:
    """Studies in a folder, or in memory if there is no folder."""

    def __init__(self, folder: Path | None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        self.storage: BaseStorage = InMemoryStorage()
        self._worker = ""
        if folder is not None:
            make_folder(folder / "workers")
            self.storage = JournalStorage(JournalFileBackend(str(folder / FILE)))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark this process as alive, so that other processes leave its trials alone."""
        if self.folder is None:
            yield
            return
        self._worker = uuid.uuid4().hex
        path = self.folder / "workers" / self._worker
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                path.unlink()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        with (self.folder / "asking.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def known(self, name: str, about: Mapping[str, Any]) -> dict[str, Range] | None:
        """Return the ranges of a study in the journal, or None if it is new.

        Raise if the study has other settings than `about`.
        """
        if name not in optuna.get_all_study_names(self.storage):
            return None
        before = optuna.load_study(study_name=name, storage=self.storage).user_attrs
        if "ranges" not in before:
            return None
        for key, value in json.loads(json.dumps(about)).items():
            if before.get(key) != value:
                raise CheckpointError(
                    f"{self.folder} holds a search of {name} with {key} = {before.get(key)!r:.80}, and now it is "
                    f"{value!r:.80}: name another folder."
                )
        return {
            key: value["list"] if "list" in value else tuple(value["ends"]) for key, value in before["ranges"].items()
        }

    def study(
        self,
        name: str,
        about: Mapping[str, Any],
        ranges: Mapping[str, Range],
        first: Mapping[str, Any],
        *,
        falls: bool,
        seed: int,
        pruner: optuna.pruners.BasePruner,
    ) -> Study:
        """Open a study, and make it if it is new; `first` are the settings of its first trial."""
        with self._alone():
            known = self.known(name, about)
            study = optuna.create_study(
                study_name=name,
                storage=self.storage,
                direction="minimize" if falls else "maximize",
                load_if_exists=True,
                sampler=SeededByNumber(seed),
                pruner=pruner,
            )
            if known is None:
                for key, value in about.items():
                    study.set_user_attr(key, value)
                study.enqueue_trial(dict(first))
                written = {key: {"list" if isinstance(one, list) else "ends": list(one)} for key, one in ranges.items()}
                study.set_user_attr("ranges", written)  # last: it marks the study as complete
        return Study(self, study, known or dict(ranges))

    def _dead(self, worker: str | None) -> bool:
        """Return whether the process of that name has ended."""
        if self.folder is None or worker == self._worker:
            return False
        try:
            with (self.folder / "workers" / str(worker)).open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
        return True


class Study:
    """One algorithm's trials."""

    def __init__(self, journal: Journal, study: optuna.Study, ranges: dict[str, Range]) -> None:
        self.journal, self.study, self.ranges, self.name = journal, study, ranges, study.study_name
        self._space = {name: _distribution(one) for name, one in ranges.items()}

    def ask(self, num_trials: int) -> Trial | None:
        """Return the next trial, or None if `num_trials` have ended or run in live processes."""
        with self.journal._alone():
            for one in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if self.journal._dead(one.user_attrs.get("worker")):
                    self.give_up(one.number, one.params)
            if len(self.study.get_trials(deepcopy=False, states=(*_ENDED, TrialState.RUNNING))) >= num_trials:
                return None
            trial = self.study.ask(self._space)
            trial.set_user_attr("worker", self.journal._worker)
            return trial

    def tell(self, trial: Trial, value: float, *, pruned: bool) -> FrozenTrial:
        state = TrialState.PRUNED if pruned else TrialState.COMPLETE
        return self.study.tell(trial, None if pruned else value, state)

    def fail(self, number: int) -> None:
        self.study.tell(number, state=TrialState.FAIL)

    def give_up(self, number: int, values: Mapping[str, Any]) -> None:
        """End an unfinished trial, and let the next trial repeat it."""
        self.fail(number)
        if values:  # a process may die before its trial has values
            self.study.enqueue_trial(dict(values))

    def ended(self) -> Sequence[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=_ENDED)


def _distribution(one: Range) -> BaseDistribution:
    if isinstance(one, list):
        return CategoricalDistribution(one)
    low, high = one
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=True)
    return FloatDistribution(low, high, log=True)
