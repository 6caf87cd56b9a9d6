"""What a task is: settings that build a problem and its clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from fedbilevel.data.clients import Holdings
from fedbilevel.problem import Problem
from fedbilevel.settings import Settings


class Built(NamedTuple):
    problem: Problem
    clients: Sequence[Holdings]


class Task(Settings):
    """`suggested` holds values that work on this task for settings the user leaves alone, for every algorithm under "*" and by name for one."""

    suggested: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    suggested_iterations: ClassVar[Mapping[str, int]] = {"*": 100}
    headline: ClassVar[tuple[str, ...]] = ("upper_loss", "lower_loss")  # the figures a person looks at first

    @classmethod
    def name(cls) -> str:
        return cls.__module__.rsplit(".", 1)[-1]

    def build(self) -> Built:
        raise NotImplementedError

    def repeated(self, r: int) -> Self:
        """The task of repetition r: other data of the same kind, where the task has a seed for them."""
        values = self.asdict()
        return dataclasses.replace(self, data_seed=values["data_seed"] + r) if "data_seed" in values else self  # type: ignore[call-arg]

    @classmethod
    def suggestions(cls, algorithm: str) -> dict[str, Any]:
        return {**cls.suggested.get("*", {}), **cls.suggested.get(algorithm, {})}

    @classmethod
    def iterations(cls, algorithm: str) -> int:
        return cls.suggested_iterations.get(algorithm, cls.suggested_iterations["*"])
