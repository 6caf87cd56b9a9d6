"""Checks of the clients, values, arrays and step sizes in the server's messages, before a site
computes with them."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedbilevel._version import __version__
from fedbilevel.errors import WireError
from fedbilevel.federation.algorithm import ServerAlgorithm
from fedbilevel.federation.host import Host
from fedbilevel.federation.probing import PHASES
from fedbilevel.sites.order import Order
from fedbilevel.sites.policy import Policy


class Incoming:
    """Reads the messages of one run, and holds the arrays that the server has sent and not
    released.

    host: object that computes for the clients of this site.
    numbers: numbers of this site's clients among all clients.
    """

    def __init__(
        self, algorithm: ServerAlgorithm, host: Host, numbers: list[int], order: Order, policy: Policy
    ) -> None:
        self.algorithm, self.host, self.numbers, self.order, self.policy = algorithm, host, numbers, order, policy
        self._auto = algorithm.auto_names()
        self.kept_names = algorithm.kept_names(host.problem.scopes)
        self.computed: set[str] = set()  # kept names that a phase has written since a version was loaded
        self._all = torch.arange(len(numbers))  # rows of the clients
        self._arrays: dict[int, Tensor] = {}

    def release(self) -> None:
        """Forget all arrays."""
        self._arrays.clear()

    def phase(self, phase: Any) -> Callable[..., Any]:
        """Return the algorithm's method with this name, or raise if it is not a phase."""
        method = getattr(self.algorithm, phase, None) if isinstance(phase, str) else None
        if method is None or not getattr(method, "__is_phase__", False):
            raise WireError(
                f"{self.algorithm.name()} of fedbilevel {__version__} at this site has no phase named {phase!r:.40}."
            )
        if phase in PHASES and not self._auto:
            raise WireError(f"a message asks for {phase}, but the plan has no step size of 'auto' to measure.")
        return method

    def check_arguments(self, phase: str, method: Callable[..., Any], values: Mapping[str, Any]) -> None:
        parameters = inspect.signature(method).parameters
        wanted = {name: parameter for name, parameter in parameters.items() if name != "clients"}
        rest = {name for name, parameter in wanted.items() if parameter.kind is parameter.VAR_KEYWORD}  # any name
        lacking = [
            name
            for name, parameter in wanted.items()
            if parameter.default is parameter.empty and name not in values and name not in rest
        ]
        if lacking or not (rest or values.keys() <= wanted.keys()):
            given = ", ".join(values) or "nothing"
            raise WireError(f"phase {phase} of this site takes {', '.join(wanted)}, but the message has {given:.100}.")

    def scaled(self, phase: str, scaled: Mapping[str, Any]) -> ServerAlgorithm:
        """Return the algorithm with the step sizes of a schedule, and with those that were measured.

        A schedule may only shorten a step of the plan. A step that is "auto" in the plan may have
        any value that the site's policy allows.
        """
        lacking = [name for name in self._auto if name not in scaled]
        if lacking and phase not in PHASES:
            raise WireError(f"a message does not say the step {lacking[0]}, which the plan leaves to a measurement.")
        may_change = (*self.algorithm.decays, *self._auto)
        wrong = [name for name, value in scaled.items() if name not in may_change or not _finite(value)]
        if wrong:
            raise WireError(
                f"a message changes {wrong[0]!r:.40}, but a schedule may only scale {', '.join(self.algorithm.decays)}."
            )
        for name in self._auto:
            if name in scaled:
                self.policy.check_setting(name, scaled[name])
        longer = [
            name
            for name, value in scaled.items()
            if not 0 <= value <= (math.inf if name in self._auto else (1 + 1e-9) * getattr(self.algorithm, name))
        ]
        if longer:
            raise WireError(
                f"a message sets {longer[0]} to {scaled[longer[0]]:.3g}, "
                "but a schedule may only shorten the plan's step."
            )
        return dataclasses.replace(self.algorithm, **scaled) if scaled else self.algorithm

    def rows(self, clients: Any) -> Tensor:
        """Return the rows of the clients that a message names, or of all clients of this site if it
        names none."""
        if clients is None:
            return self._all
        known = isinstance(clients, list) and all(type(number) is int and number in self.numbers for number in clients)
        if not known or not clients or clients != sorted({*clients}):
            raise WireError(
                f"a message is about the clients {clients!r:.80}, expected some of {self.numbers}, in order."
            )
        return torch.tensor([self.numbers.index(number) for number in clients])

    def values(self, header: Mapping[str, Any], arrays: list[Tensor], rows: Tensor) -> dict[str, Any]:
        """Return the values of a message by name, for the clients of these rows, and drop arrays
        that the server has released."""
        for name, how in (header.get("place") or {}).items():
            if name in self.computed or not self.order.at_start(header["iteration"]):
                raise WireError(
                    f"a message asks to place {name!r:.40} again, "
                    "but start values are placed only before outer iteration 1."
                )
            self._place(name, how)
        numbers, live, values = header.get("new", []), header.get("live", []), header.get("values", {})
        if (
            not isinstance(numbers, list)
            or len(numbers) != len(arrays)
            or not isinstance(live, list)
            or not isinstance(values, dict)
        ):
            raise WireError("a message does not name the arrays that it brings.")
        self._arrays = {number: self._arrays[number] for number in live if number in self._arrays}
        self._arrays.update({number: array.to(self.host.device) for number, array in zip(numbers, arrays, strict=True)})
        measuring = header["kind"] == "measure"
        found = {name: self._value(name, entry, rows, measuring) for name, entry in values.items()}
        if not {*numbers} <= {entry.get("array") for entry in values.values()}:
            self._arrays.clear()
            raise WireError("a message brings arrays that it does not use.")
        return found

    def _value(self, name: str, entry: Any, rows: Tensor, measuring: bool) -> Any:
        """Read one value of a message. A kept value may only be used under a kept name, because a
        phase could send it under another name. A measurement may use it as x or y, because only
        figures leave."""
        if name in self.kept_names and not (
            isinstance(entry, dict) and (isinstance(entry.get("kept"), str) or entry == {"value": None})
        ):
            raise WireError(
                f"a message brings a value of {name}, which stays at this site: it may only be named as kept."
            )
        match entry:
            case {"array": number}:
                if number not in self._arrays:
                    raise WireError(
                        f"a message refers to array {number!r:.40} for {name:.40}, which this site does not hold."
                    )
                array = self._checked(name, self._arrays[number])
                return array if array.ndim == 1 else array[rows.to(array.device)]
            case {"kept": str(kept)}:
                if kept not in self.kept_names or not (measuring or name in self.kept_names):
                    raise WireError(f"a message gives {kept!r:.40} as {name:.40}, but not both are kept at this site.")
                zeros = torch.zeros(self.host.width(kept), dtype=self.host.dtype, device=self.host.device)
                return self.host.kept.read(kept, rows, zeros.expand(len(rows), -1))
            case {"value": None | bool() | int() | str() as plain}:
                return plain
            case {"value": float(number)} if math.isfinite(number):
                return number
        raise WireError(
            f"a message gives {name:.40} as {entry!r:.80}, expected an array, a kept value or a finite number."
        )

    def _checked(self, name: str, array: Tensor) -> Tensor:
        try:
            free = name in self.algorithm.statistics and array.ndim == 1
            width = len(array) if free else self.host.width(name)
        except KeyError:
            raise WireError(
                f"a message brings an array named {name:.40}, which {self.algorithm.name()} does not declare."
            ) from None
        if array.dtype != self.host.dtype or array.shape not in ((width,), (len(self.numbers), width)):
            expected = f"{self.host.dtype} of length {width}"
            raise WireError(f"{name} arrived as {array.dtype} of shape {tuple(array.shape)}, expected {expected}.")
        if not bool(torch.isfinite(array).all()):
            raise WireError(f"{name} arrived with a value that is not finite.")
        return array

    def _place(self, name: str, how: Any) -> None:
        """Set a kept value to its start or to zero."""
        if name not in self.kept_names or how not in ("start", "zeros"):
            raise WireError(
                f"a message asks to place {name!r:.40} as {how!r:.40}, expected a kept name, at its start or at zero."
            )
        start = self.host.x0 if name in self.algorithm.upper_space else self.host.y0
        rows = start if how == "start" else start.new_zeros(self.host.width(name))
        self.host.kept.write(name, self._all, (rows if rows.ndim == 2 else rows.expand(len(self.numbers), -1)).clone())


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
