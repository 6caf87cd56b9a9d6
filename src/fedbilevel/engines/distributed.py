"""Group of several processes on torch.distributed, as torchrun starts them.

Ranks communicate by gloo between CPUs and by NCCL between GPUs. Every exchange begins with a status
word from every rank: running, or failed. So when one rank fails alone, the others learn of the
failure at their next exchange, and all ranks end with the same message. Status words always pass
over gloo, which notices a dead process at once and a frozen process after the timeout; NCCL notices
neither as quickly. Nothing is pickled.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from fedbilevel import errors
from fedbilevel.engines.ranks import EngineName, Group
from fedbilevel.errors import FedBilevelError, RankLostError, SettingError
from fedbilevel.problem.client_data import Holdings

TIMEOUT = 600.0  # seconds
STARTED_BY = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # variables that torchrun sets
_LONGEST = 1e9  # seconds; torch counts no further than some centuries
_GRACE, _LOOK = 3.0, 0.05  # seconds for remaining ranks to register, and between looks
_joined: dict[tuple[str, float], Ranks] = {}


def started() -> bool:
    """Return whether torchrun, or a program that uses torch.distributed, started this process."""
    return dist.is_initialized() or all(name in os.environ for name in STARTED_BY)


def check_timeout(timeout: float) -> None:
    """Raise an error for an invalid timeout, even in a single process, which ignores the timeout."""
    if not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
        raise SettingError(f"timeout is {timeout!r}, expected seconds above 0, at most {_LONGEST:g}.")


def join(device: torch.device | str = "cpu", timeout: float = TIMEOUT) -> Ranks:
    """Join the group of all ranks, once per process.

    A program that has initialised torch.distributed itself keeps its group.
    """
    check_timeout(timeout)
    if not dist.is_available():
        raise SettingError(
            "this torch was built without torch.distributed: install another build, or use the engine 'simulation'."
        )
    if not started():
        raise SettingError(
            "the engine 'distributed' needs processes that torchrun started: type torchrun --nproc-per-node "
            "2 -m fedbilevel run ... --engine distributed "
            "(or torchrun ... your_script.py), or leave the engine out to run all clients in this process."
        )
    kind = torch.device(device).type
    if (kind, timeout) not in _joined:
        limit = timedelta(seconds=timeout)
        if not dist.is_initialized():
            try:
                dist.init_process_group("gloo", timeout=limit)
            except (RuntimeError, ValueError) as error:
                raise SettingError(
                    f"the ranks did not find each other ({_first_line(error)}): start all of them, with the "
                    "same rendezvous."
                ) from error
            atexit.register(_leave)
        _joined[kind, timeout] = Ranks(kind, limit)
    return _joined[kind, timeout]


class Ranks(Group):
    engine: EngineName = "distributed"

    def __init__(self, kind: str, timeout: timedelta) -> None:
        self.rank, self.size, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._local = int(os.environ.get("LOCAL_RANK", self.rank))
        self._words: Any = dist.new_group(backend="gloo", timeout=timeout)
        # two ranks cannot share a GPU under NCCL; then arrays pass through main memory
        several = (
            kind == "cuda"
            and dist.is_nccl_available()
            and int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) <= torch.cuda.device_count()
        )
        if several:
            torch.cuda.set_device(self._local)
        self._arrays: Any = dist.new_group(backend="nccl", timeout=timeout) if several else None
        self.backend = "nccl" if several else "gloo"
        self._depth, self._agreed = 0, False

    def shares(self, num_clients: int) -> list[range]:
        if self.size > num_clients:
            raise SettingError(
                f"there are {self.size} ranks for {num_clients} clients, and every rank hosts at least one: "
                f"start {num_clients} ranks or fewer."
            )
        ends = [num_clients * rank // self.size for rank in range(self.size + 1)]
        return [range(start, end) for start, end in pairwise(ends)]

    def only(self, clients: Sequence[Holdings]) -> Sequence[Holdings]:
        mine = self.shares(len(clients))[self.rank]
        return [client if place in mine else {} for place, client in enumerate(clients)]

    def device(self, asked: torch.device | str) -> torch.device | str:
        """Return the device of this rank; `cuda` means the rank's own GPU."""
        asked = torch.device(asked)
        return (
            torch.device("cuda", self._local % torch.cuda.device_count())
            if asked.type == "cuda" and asked.index is None
            else asked
        )

    # ---- exchanges ------------------------------------------------------------------------------------------------

    def sum(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        if not parts:
            return parts
        together, back = self._wire(torch.cat(list(parts)) if len(parts) > 1 else parts[0].clone())
        self._meet(len(together))
        self._pass(lambda: dist.all_reduce(together, group=self._group(together)))
        return back(together).split([len(part) for part in parts])

    def joined(self, part: Tensor, lengths: Sequence[int], *, everywhere: bool = True) -> Tensor:
        longest = max(lengths)
        mine, back = self._wire(torch.cat([part, part.new_zeros(longest - len(part))]))
        every = everywhere or self.rank == 0
        parts = [torch.empty_like(mine) for _ in range(self.size)] if every else None
        self._meet(longest)
        if everywhere:
            self._pass(lambda: dist.all_gather(parts, mine, group=self._group(mine)))
        else:
            self._pass(lambda: dist.gather(mine, parts, dst=0, group=self._group(mine)))
        return (
            back(torch.cat([one[:length] for one, length in zip(parts or [], lengths, strict=True)]))
            if every
            else part.new_empty(0)
        )

    def swapped(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> Sequence[Tensor]:
        device = parts[self.rank].device
        sent = [self._wire(part)[0] for part in parts]
        got = [sent[0].new_empty(length) for length in lengths]

        def pass_on() -> None:
            group = self._group(sent[0])
            others = [(self.rank + hop) % self.size for hop in range(1, self.size)]
            ops = [dist.P2POp(dist.isend, sent[other], other, group) for other in others if len(sent[other])]
            ops += [dist.P2POp(dist.irecv, got[other], other, group) for other in others if len(got[other])]
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()

        self._meet()
        self._pass(pass_on)
        return [parts[self.rank] if other == self.rank else one.to(device) for other, one in enumerate(got)]

    def largest(self, value: int) -> int:
        self._meet()
        return self._say([value])[0]

    def told(self, make: Callable[[], Any]) -> Any:
        content = json.dumps(make()).encode() if self.rank == 0 else b""
        return json.loads(self._bytes(content))

    def told_tensors(self, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        content = (
            save({name: tensor.contiguous().clone() for name, tensor in make().items()}) if self.rank == 0 else b""
        )
        return load(self._bytes(content))

    def check_same(self, what: bytes, complaint: str) -> None:
        number = int.from_bytes(hashlib.blake2b(what, digest_size=7).digest(), "big")
        self._meet()
        if sum(self._say([number, -number])) != 0:
            raise SettingError(complaint)

    def meet(self) -> None:
        self._meet()

    # ---- failing together -----------------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        except RankLostError:
            self._agreed = True  # no rank is left to inform
            raise
        except Exception as error:  # the other ranks must learn of any error
            if self._agreed:
                raise
            raise self._fail(error) from None
        finally:
            self._depth -= 1
            self._agreed = self._agreed and self._depth > 0

    def _meet(self, size: int = 0) -> None:
        """Check by status words that no rank failed and all exchange equally many entries."""
        failed, most, least = self._say([0, size, -size])
        if failed:
            raise self._heard(self.size - failed, None)
        if most + least:
            raise RuntimeError(
                f"rank {self.rank} is about to exchange {size} entries, another rank {most}: the ranks do not "
                "run the same program."
            )

    def _fail(self, error: Exception) -> Exception:
        """Announce a failure at the next exchange of the other ranks.

        If several ranks fail at once, the failure of the lowest rank is reported.
        """
        try:
            failed, *_ = self._say([self.size - self.rank, 0, 0])
        except RankLostError:
            return error
        return self._heard(self.size - failed, error)

    def _heard(self, rank: int, mine: Exception | None) -> Exception:
        self._agreed = True
        content = json.dumps([type(mine).__name__, str(mine)]).encode() if rank == self.rank else b""
        kind, text = json.loads(self._raw(content, rank))
        if rank == self.rank and mine is not None:
            return mine
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, FedBilevelError):
            again = known.__new__(known)
            again.args = (text,)
            return again
        return FedBilevelError(f"rank {rank} failed with {kind}: {text.removesuffix('.')}.")

    def _say(self, words: list[int]) -> list[int]:
        word = torch.tensor(words)
        self._pass(lambda: dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self._words))
        return word.tolist()

    def _pass(self, exchange: Callable[[], Any]) -> None:
        """Run an exchange.

        If the exchange breaks, the remaining ranks register in torchrun's store, and the error
        names the ranks that do not register.
        """
        if self._words is None:
            raise RankLostError(
                f"a rank of {self.size} was lost before, so the others can exchange nothing any more: start "
                "all of them again."
            )
        try:
            exchange()
            return
        except RuntimeError as error:
            text = str(error).lower()
        missing, late = self._missing("timed out" in text or "timeout" in text)
        named = [str(rank) for rank in missing]
        who = (
            f"rank {named[0]}"
            if len(named) == 1
            else f"ranks {', '.join(named[:-1])} and {named[-1]}"
            if named
            else "another rank"
        )
        why = f"no word within {self.timeout.total_seconds():g} s" if late else "the connection is closed"
        lost = RankLostError(f"{who} of {self.size} no longer answer{'' if len(named) > 1 else 's'} ({why}).")
        lost.speaks = not missing or self.rank == min(set(range(self.size)) - set(missing))
        raise lost

    def _missing(self, late: bool) -> tuple[list[int], bool]:
        """Return ranks that do not register within a few seconds, and whether a rank timed out.

        No rank is named if the missing ranks cannot be known.
        """
        left = {self.rank}
        place = f"fedbilevel/left/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{{}}".format
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(place(self.rank), "late" if late else "closed")
            dist.destroy_process_group(self._words)
            self._words = None  # closes the connections, so that ranks that wait for this one notice
            for _ in range(int(_GRACE / _LOOK)):
                left |= {rank for rank in range(self.size) if rank not in left and store.check([place(rank)])}
                if len(left) == self.size:
                    break
                time.sleep(_LOOK)
            return sorted(set(range(self.size)) - left), any(store.get(place(rank)) == b"late" for rank in left)
        except (
            RuntimeError
        ):  # the store went with the process that kept it: before it could say anything, or when it had
            return sorted(set(range(self.size)) - left) if len(left) > 1 else [], late

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _bytes(self, content: bytes) -> bytes:
        self._meet()
        return self._raw(content, 0)

    def _raw(self, content: bytes, source: int) -> bytes:
        size = torch.tensor([len(content)])
        self._pass(lambda: dist.broadcast(size, source, group=self._words))
        mine = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if source == self.rank
            else torch.empty(int(size), dtype=torch.uint8)
        )
        self._pass(lambda: dist.broadcast(mine, source, group=self._words))
        return mine.numpy().tobytes()

    def _wire(self, tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return a tensor on a device that can send it, and a function that moves a tensor back."""
        device = tensor.device
        if device.type == "cpu" or self.backend == "nccl":
            return tensor.contiguous(), lambda back: back
        return tensor.cpu().contiguous(), lambda back: back.to(device)

    def _group(self, tensor: Tensor) -> Any:
        return self._words if tensor.device.type == "cpu" else self._arrays


def _leave() -> None:
    """Leave the group at the end of the process.

    A group that outlives the interpreter crashes the process.
    """
    for ranks in _joined.values():
        ranks._words = ranks._arrays = None
    _joined.clear()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0].split(". This may indicate")[0].rstrip(". ")
