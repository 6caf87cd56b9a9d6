"""The end of a run by Ctrl-C, by an error or as planned, and the report of it to callbacks."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from fedbilevel.engines.engine import Regrouped
from fedbilevel.engines.ranks import Group
from fedbilevel.errors import CheckpointError, FedBilevelError, NonFiniteError, RankLostError
from fedbilevel.runs.callbacks import Callback, Follower
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Ending, Result

STOPPED = ("", "callback", "interrupted")  # who stops a run; where ranks differ, the last one counts


def whole(result: Result) -> Result:
    """Return the result of one of several runs, or raise KeyboardInterrupt if Ctrl-C stopped that run.

    A part of a run is no result for the runs after it.
    """
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    return result


@contextmanager
def followed(
    callbacks: Sequence[Callback],
    record: Record | None,
    config: Mapping[str, Any],
    rows: list[dict[str, Any]],
    when: Callable[[], tuple[Ending, int]],
) -> Iterator[None]:
    """Report the beginning and the end of a run to followers and the record, even after an error.

    when: function that returns how the run ended, and after which outer iteration.
    """
    how = "failed"

    def leave(follower: Follower) -> None:
        follower.end(rows, how)

    def write(why: str = "") -> None:
        if record is not None:
            record.write_end(how, when()[1], why)

    with ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, Follower):
                callback.begin(config, rows)
                stack.callback(leave, callback)
        try:
            yield
        except KeyboardInterrupt:
            how = "interrupted"
            write()
            raise
        except Regrouped:  # the run continues: the same outer iteration begins again with other peers
            raise
        except Exception as error:
            with suppress(CheckpointError):  # a full disk has been reported already
                write(str(error) if isinstance(error, FedBilevelError) else f"{type(error).__name__}: {error}")
            raise
        else:
            how, why = when()[0]
            write(why)


@contextmanager
def with_remains(
    when: Callable[[], tuple[int, int]], record: Record | None, config: Mapping[str, Any]
) -> Iterator[None]:
    """Add the last checkpoint to the message of a fatal error.

    when: function that returns the current outer iteration and that of the last checkpoint.
    """
    try:
        yield
    except NonFiniteError as error:
        place = f"of outer iteration {when()[1]}, is in {record.path}" if record is not None else ""
        where = f"; the last good checkpoint, {place}" if place else ""
        raise NonFiniteError(f"{str(error).removesuffix('.')}{where}.") from None
    except RankLostError as error:
        lost = RankLostError(
            f"{str(error).removesuffix('.')} in outer iteration {when()[0]}; {_remedy(when()[1], record, config)}."
        )
        lost.speaks = error.speaks
        raise lost from None


def _remedy(saved: int, record: Record | None, config: Mapping[str, Any]) -> str:
    """Name the last checkpoint and the call that resumes from it."""
    if record is None:
        return "nothing was recorded: give a record to be able to resume"
    call = "the same call and resume=True"
    if "task" in config:
        call = f"torchrun --nproc-per-node {config['ranks']} -m fedbilevel resume {record.path}"
    return f"the last checkpoint, of outer iteration {saved}, is in {record.path}: resume with {call}"


@contextmanager
def interrupts(group: Group, *, saves: bool = False) -> Iterator[Callable[[], bool]]:
    """Delay the first Ctrl-C until the outer iteration ends; a second one acts at once.

    saves: whether there is a record, which keeps the last checkpoint.

    Only the main thread can do this. Any of several ranks may be interrupted. When a rank dies,
    torchrun sends SIGTERM to the other ranks, which must still report the loss before they end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = threading.Event()
    numbers = (signal.SIGINT, *([signal.SIGTERM] if group.size > 1 else []))
    before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}

    def remember(number: int, frame: FrameType | None) -> None:
        asked.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[number])
            if group.rank == 0:
                kept = " and keeps the last checkpoint" if saves else ""
                print(f"\nStopping after this outer iteration; Ctrl-C again stops at once{kept}.", file=sys.stderr)

    for number in before:
        signal.signal(number, remember)
    try:
        yield asked.is_set
    except RankLostError:
        before.pop(signal.SIGTERM, None)  # the signal may come late, and the loss is still to be reported
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
