"""The server's mailbox: it writes and numbers messages, reads answers, and turns unusable answers
into failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedbilevel.errors import SuspendedError, WireError
from fedbilevel.escapes import printable
from fedbilevel.sites import wire
from fedbilevel.sites.transport import Failure, SiteTransport

LONGEST = 500  # characters of a reason
ROOM = 2**20  # bytes of an answer without arrays
_CALLERS = 20  # refused callers that one answer may name


class Answer(NamedTuple):
    header: dict[str, Any]
    arrays: dict[str, list[Tensor]]
    seconds: float


class SiteMessage(NamedTuple):
    """A message to one site, before it is packed."""

    header: Mapping[str, Any]
    arrays: Sequence[Tensor] = ()


class Mailbox:
    """Exchanges messages with sites. Each message carries a turn: (attempt, epoch, step).

    Steps count messages. A new epoch begins after a missed deadline, so that a site refuses the
    late message. An attempt is a run or its resumption, and its number comes from the clock.
    """

    _attempt = 0

    def __init__(self, transport: SiteTransport, run: str, lost: Callable[[], float] = lambda: 0.0) -> None:
        """Create a mailbox for one attempt.

        lost: function that returns the seconds for which this process has been suspended so far.
        """
        self.transport, self.run, self._lost = transport, run, lost
        # later than any attempt before it, including those of a server that died
        Mailbox._attempt = max(Mailbox._attempt + 1, time.time_ns() // 10**6)
        self._turn = [Mailbox._attempt, 0, 0]
        self.sent = self.received = 0  # bytes of messages
        self._strangers: dict[str, dict[str, int]] = {}

    @property
    def reachable(self) -> Sequence[str]:
        return self.transport.sites

    def exchange(
        self, messages: Mapping[str, SiteMessage], *, deadline: float, longest: Mapping[str, int] | None = None
    ) -> tuple[dict[str, Answer], dict[str, Failure]]:
        """Send messages and return readable answers and failures, both by site in the order of
        names. Equal messages share their bytes.

        longest: the maximal size in bytes of each site's answer.
        """
        self._turn[2] += 1
        content = self._packed(messages)
        before = self._lost()
        replies, failures = self.transport.exchange(content, deadline=deadline)
        asleep = self._lost() - before
        self.sent += sum(map(len, content.values()))
        answers: dict[str, Answer] = {}
        for name in sorted(messages):
            if name in replies:
                self.received += len(replies[name].content)
                try:
                    _check_length(replies[name].content, (longest or {}).get(name, ROOM))
                    header, arrays = wire.unpack(replies[name].content)
                    self._hear(name, header.pop("strangers", None))
                    answers[name] = _read(header, arrays, replies[name].seconds)
                except WireError as error:
                    failures[name] = Failure(False, str(error), replies[name].seconds, wait=isinstance(error, _Waits))
            elif name not in failures:
                failures[name] = Failure(True, "it cannot be reached.", 0.0)
        # reasons go to logs and terminals
        failures = {name: failure._replace(reason=printable(failure.reason)) for name, failure in failures.items()}
        if any(failure.silent for failure in failures.values()):
            self._turn[1] += 1
        if asleep and any(failure.silent and failure.seconds - asleep < deadline for failure in failures.values()):
            raise SuspendedError(
                f"the server was suspended for {asleep:.1f} s while it waited for answers; "
                "the outer iteration is done again."
            )
        return answers, dict(sorted(failures.items()))

    def _packed(self, messages: Mapping[str, SiteMessage]) -> dict[str, bytes]:
        packed: dict[tuple[str, tuple[int, ...]], bytes] = {}
        content = {}
        for name, message in messages.items():
            key = (repr(message.header), tuple(map(id, message.arrays)))
            if key not in packed:
                packed[key] = wire.pack({**message.header, "run": self.run, "turn": list(self._turn)}, message.arrays)
            content[name] = packed[key]
        return content

    def _hear(self, site: str, reported: Any) -> None:
        """Count the refused callers that a site reports."""
        if isinstance(reported, dict) and all(type(times) is int and 0 < times < 2**40 for times in reported.values()):
            counts = self._strangers.setdefault(site, {})
            for caller, times in list(reported.items())[:_CALLERS]:
                name = printable(caller)[:100]
                counts[name] = counts.get(name, 0) + times

    def strangers(self) -> dict[str, dict[str, int]]:
        """Return how often sites refused callers since the last call, by site and name of the
        caller."""
        found, self._strangers = self._strangers, {}
        return {**found, **self.transport.strangers()}


def _check_length(content: bytes, most: int) -> None:
    if len(content) > most:
        raise WireError(
            f"its answer has {len(content)} bytes, expected at most {most}: "
            "install the same version of fedbilevel at all sites."
        )


class _Waits(WireError):
    """The error of a site that waits for its operator."""


def _read(header: dict[str, Any], arrays: Sequence[Tensor], seconds: float) -> Answer:
    if "error" in header:
        raise (_Waits if header.get("wait") is True else WireError)(_sentence(header["error"]))
    if "wait" in header:
        header["wait"] = _sentence(header["wait"])
    if "busy" in header:
        return Answer(header, {}, seconds)
    order = header.get("order")
    if (
        not isinstance(order, dict)
        or not all(isinstance(many, int) and many >= 0 for many in order.values())
        or sum(order.values()) != len(arrays)
    ):
        raise WireError("its answer does not name the arrays that it brings.")
    named, start = {}, 0
    for name, many in order.items():
        named[name] = list(arrays[start : start + many])
        start += many
    return Answer(header, named, seconds)


def _sentence(reason: Any) -> str:
    return printable(" ".join(str(reason).split())[:LONGEST].rstrip(".") + ".")
