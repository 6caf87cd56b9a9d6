"""Tasks: settings that build a problem and its clients.

In a federation no party can build both: sites have data and the server has none. So a problem is
made from settings and `Shapes`, which describe the shapes and types of samples but hold no values.
`build()` does the same with the shapes of the data that it made.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from torch import Tensor

from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.settings import Settings
from fedbilevel.tasks.rival import Rival, Way, with_validation

Kind = Literal["float", "int", "bool"]
_WORDS: dict[str, str] = {"float": "floating-point numbers", "int": "whole numbers", "bool": "true or false"}


class Sample(NamedTuple):
    """Shape and type of one sample in a field."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def kind(self) -> str:
        """Return "float", "int" or "bool"; a run converts floats to its own precision."""
        known = {"float": ("float", "bfloat"), "int": ("int", "uint"), "bool": ("bool",)}
        return next((kind for kind, starts in known.items() if self.dtype.startswith(starts)), self.dtype)

    def __str__(self) -> str:
        return f"{_WORDS.get(self.kind, self.dtype)} of shape {self.shape}"


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Shapes and types of one client's samples, without values, so that a server may know them.

    fields: role -> field -> (shape of one sample, name of its type).
    num_classes: number of classes over all sites; the data of one site may contain fewer.
    """

    fields: Mapping[str, Mapping[str, Sample]]
    num_classes: int | None = None

    def __post_init__(self) -> None:
        num = self.num_classes
        if num is not None and (not isinstance(num, int) or isinstance(num, bool) or num < 2):
            raise ProblemError(
                f"num_classes is {num!r}, expected a whole number, at least 2, or None where labels are no classes."
            )
        try:
            same = {
                role: {name: Sample(_shape(shape), _text(dtype)) for name, (shape, dtype) in own.items()}
                for role, own in self.fields.items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise ProblemError(
                f"the fields are {self.fields!r}, expected "
                f"{{role: {{field: (shape of one sample, name of its type)}}}}."
            ) from error
        object.__setattr__(
            self, "fields", MappingProxyType({role: MappingProxyType(own) for role, own in same.items()})
        )

    @classmethod
    def of(cls, holdings: Holdings, num_classes: int | None = None) -> Shapes:
        return cls(
            {role: {name: _looks(value, role, name) for name, value in own.items()} for role, own in holdings.items()},
            num_classes,
        )

    def asdict(self) -> dict[str, Any]:
        """Return plain lists and dicts for JSON."""
        fields = {
            role: {name: [list(shape), dtype] for name, (shape, dtype) in own.items()}
            for role, own in self.fields.items()
        }
        return {"fields": fields, "num_classes": self.num_classes}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Shapes:
        if not isinstance(values, Mapping) or set(values) != {"fields", "num_classes"}:
            raise ProblemError(f"the shapes are {values!r}, expected a table with fields and num_classes.")
        return cls(values["fields"], values["num_classes"])

    def has(self, role: str, *names: str) -> bool:
        return all(name in self.fields.get(role, {}) for name in names) and role in self.fields

    def classes(self) -> int:
        if self.num_classes is None:
            raise ProblemError(
                "num_classes is not given, but labels are classes: say how many there are at all sites together, as "
                "one site may lack a class."
            )
        return self.num_classes

    def sample(
        self, name: str, *roles: str, kinds: Sequence[Kind] = ("float",), ndim: int | None = None
    ) -> tuple[int, ...]:
        """Return the shape of one sample in a field.

        The shape must be the same in all given roles that have the field.
        """
        found = {f"{role}/{name}": self.fields[role][name] for role in roles if self.has(role, name)}
        where, first = next(iter(found.items()))
        for place, one in found.items():
            if one.kind not in kinds:
                raise ProblemError(
                    f"{place} holds {_WORDS.get(one.kind, one.dtype)} ({one.dtype}), expected "
                    f"{' or '.join(map(_WORDS.__getitem__, kinds))}."
                )
            if one.shape != first.shape:
                raise ProblemError(
                    f"samples of {where} have the shape {first.shape} and those of {place} {one.shape}: both need "
                    "the same."
                )
        if ndim is not None and len(first.shape) != ndim:
            what = ("one number", "one row of numbers", "rows and columns of numbers", "three dimensions")[ndim]
            raise ProblemError(f"samples of {where} have the shape {first.shape}, expected {what} each: reshape them.")
        return first.shape

    def misfit(self, own: Shapes) -> str | None:
        """Return why a problem for these shapes cannot use data with the shapes `own`, or None.

        Additional roles and fields are allowed.
        """
        if own.num_classes != self.num_classes:
            return f"there are {own.num_classes} classes, expected {self.num_classes}"
        for role, fields in self.fields.items():
            for name, asked in fields.items():
                if not own.has(role, name):
                    return f"there is no {role}/{name}, expected {asked}"
                found = own.fields[role][name]
                if (found.shape, found.kind) != (asked.shape, asked.kind):
                    return f"samples of {role}/{name} are {found}, expected {asked}"
        return None


class Built(NamedTuple):
    """A problem and its clients."""

    problem: Problem
    clients: Sequence[Holdings]


class Task(Settings):
    """Settings that build a problem and its clients.

    suggested: settings that replace the defaults of algorithms on this task; the key is the name of
        an algorithm, or "*" for all algorithms but self_tuned.
    suggested_iterations: numbers of outer iterations, with the same keys.
    num_folds: parts of the validation samples in `guarded`.
    automatic: the algorithm of `guarded`, with its suggested settings.
    classes: whether the upper loss is the cross-entropy of the field `label`, whole numbers from 0, so
        that `guarded` may blend classifiers, whose figures are then those of `graded`.
    judge: a role that no run learns from, and its statistics of right answers and of all answers, by
        which `guarded` chooses; None: validation samples choose, which are left out in turn.
    avoid: when a plain way is better, as the end of "do not use this when ...".
    headline: the most important figures.
    needs: the fields that a site's folder must hold, as role -> field -> meaning in one line.
    measures: fields that only figures need; without these fields, the figures are absent.
    """

    suggested: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    suggested_iterations: ClassVar[Mapping[str, int]] = {"*": 100}
    num_folds: ClassVar[int] = 2
    automatic: ClassVar[str] = "self_tuned"
    classes: ClassVar[bool] = False
    judge: ClassVar[tuple[str, str, str] | None] = None
    avoid: ClassVar[str] = ""
    headline: ClassVar[tuple[str, ...]] = ("upper_loss", "lower_loss")
    needs: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    measures: ClassVar[Mapping[str, Mapping[str, str]]] = {}

    @classmethod
    def name(cls) -> str:
        return cls.__module__.rsplit(".", 1)[-1]

    def build(self) -> Built:
        raise NotImplementedError

    def problem(self, shapes: Shapes) -> Problem:
        """Return the problem for samples of these shapes; server and sites get the same."""
        raise ProblemError(
            f"the task {self.name()} makes its problem out of data, which a server does not have: give it a method "
            "problem(shapes)."
        )

    def check(self, shapes: Shapes) -> None:
        """Raise unless the shapes have all fields that this task needs."""
        for role, fields in self.needs.items():
            for name, meaning in fields.items():
                if not shapes.has(role, name):
                    found = (
                        ", ".join(f"{role}/{field}" for role, own in shapes.fields.items() for field in own)
                        or "nothing"
                    )
                    raise ProblemError(
                        f"{self.name()} needs {role}/{name} ({meaning}), but there is {found} only: add that field."
                    )

    def repeated(self, r: int) -> Self:
        """Return the task of repetition r.

        If the task has a data_seed, the repetition has other data of the same kind.
        """
        values = self.asdict()
        if "data_seed" not in values:
            return self
        return dataclasses.replace(self, data_seed=values["data_seed"] + r)  # type: ignore[call-arg]

    def with_built(self, built: Built) -> Self:
        """Return the task on this problem and these clients: `build` and `rivals` use them."""
        own = copy.copy(self)
        object.__setattr__(own, "build", lambda: built)
        return own

    def rivals(self) -> Mapping[str, Rival]:
        """Return plain ways to the same end, by name.

        They are made from the clients of `self.build()`, and each measures this task's figures under
        the same names.
        """
        return {}

    def judged(self, problem: Problem) -> Problem:
        """Return the problem whose upper loss compares answers in `guarded`: without penalties of x."""
        return problem

    def refits(self, problem: Problem, clients: Sequence[Holdings], x: Mapping[str, Tensor]) -> Mapping[str, Way]:
        """Return ways to train y once more with the learned x, by label.

        By default y is trained on training and validation samples together, if validation samples
        have every field that training needs.
        """
        if not all(set(client["train"]) <= set(client["val"]) for client in clients):
            return {}
        return {"refitted": Way(dataclasses.replace(problem, x0=x), with_validation(clients))}

    def graded(self, scores: np.ndarray, labels: np.ndarray, owners: np.ndarray) -> dict[str, float]:
        """Return figures of log-probabilities (samples, classes) of test samples, under this task's names.

        owners: the client of every sample.
        """
        return {"test_accuracy": float((scores.argmax(1) == labels).mean())}

    def findings(self, problem: Problem, clients: Sequence[Holdings], result: Any) -> list[dict[str, Any]]:
        """Return results of a solution besides figures, in the forms of tasks/findings.py.

        result: an object with x and y, each a dict of tensors or a list of one dict per client.
        """
        return []

    @classmethod
    def suggestions(cls, algorithm: str) -> dict[str, Any]:
        """Return suggested settings; those of "*" are not for a method that measures its own."""
        shared = cls.suggested.get("*", {}) if algorithm != "self_tuned" else {}
        return {**shared, **cls.suggested.get(algorithm, {})}

    @classmethod
    def iterations(cls, algorithm: str) -> int:
        return cls.suggested_iterations.get(algorithm, cls.suggested_iterations["*"])


def _shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, str) or not all(
        isinstance(side, int) and not isinstance(side, bool) and side >= 0 for side in shape
    ):
        raise ValueError(shape)
    return tuple(shape)


def _text(dtype: Any) -> str:
    if not isinstance(dtype, str):
        raise TypeError(dtype)
    return dtype


def _looks(value: Any, role: str, name: str) -> Sample:
    array = value if isinstance(value, Tensor) else np.asarray(value)
    if array.ndim == 0:
        raise ProblemError(f"{role}/{name} is a single number: give one row per sample.")
    return Sample(tuple(array.shape[1:]), str(array.dtype).removeprefix("torch."))
