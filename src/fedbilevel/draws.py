"""Addressed randomness: every draw is a pure function of where it is used, never of what was drawn before.

The stream is Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
Key = (seed, purpose); counter = (position, call and step, outer iteration, client). A client therefore draws the same
numbers whether it is alone in its process or hosted with a thousand others, in any order, and after a resume.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.errors import SettingError

SERVER = 2**32 - 1  # the client number under which the server draws
_MASK = 0xFFFFFFFF
MAX_STEPS = 2**16  # steps share a counter word with the call number
Address = int | Tensor  # a tensor of one number where a captured phase is replayed at other addresses


def _word(value: int, purpose: str) -> int:
    if not 0 <= value <= _MASK:
        raise SettingError(f"{purpose} must lie between 0 and 2**32 - 1, got {value}.")
    return value


def philox(key: tuple[int, int], counter: tuple[Any, Any, Any, Any]) -> tuple[Any, ...]:
    """Ten rounds on int64 tensors or arrays that hold uint32 words; products wrap modulo 2**64, which is what is wanted."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _words(xp: Any, key: tuple[int, int], ids: Any, steps: range, blocks: int, iteration: Address, call: Address) -> Any:
    """(k, len(steps), 4 * blocks) words by numpy or torch (`xp`): the counter's four parts vary along different axes, and meet in the first rounds."""
    position = xp.arange(blocks).reshape(1, 1, -1)
    step = (xp.arange(steps.start, steps.stop) + (call << 16)).reshape(1, -1, 1)
    when = xp.full((1, 1, 1), iteration) if isinstance(iteration, int) else iteration
    words = philox(key, (position, step, when, ids.reshape(-1, 1, 1)))
    shape = (len(ids), len(steps), blocks)
    return xp.stack([xp.broadcast_to(word, shape) for word in words], -1).reshape(len(ids), len(steps), 4 * blocks)


class Stream:
    """Draws for one seed. `ids` are client numbers, one row each; the result never depends on which rows are asked together."""

    def __init__(self, seed: int) -> None:
        self.seed = _word(int(seed), "seed")

    def bits(self, purpose: str, ids: Tensor, *, iteration: Address, call: Address, steps: range, width: int) -> Tensor:
        """Uniform 32-bit words, (k, len(steps), width), as int64."""
        if steps.stop > MAX_STEPS or (isinstance(call, int) and call >= MAX_STEPS):
            raise SettingError(f"at most {MAX_STEPS} steps per phase and phases per outer iteration, got step {steps.stop} of call {call}.")
        blocks, key = -(-width // 4), (self.seed, zlib.crc32(purpose.encode()))
        if isinstance(iteration, int):
            _word(iteration, "the outer iteration")
        if ids.device.type == "cpu" and isinstance(iteration, int):  # numpy spends a quarter of the time on small arrays, which these are
            return torch.from_numpy(_words(np, key, ids.numpy(), steps, blocks, iteration, call)[..., :width])
        with torch.device(ids.device):
            return _words(torch, key, ids, steps, blocks, iteration, call)[..., :width]

    def integers(self, purpose: str, ids: Tensor, high: Tensor, *, iteration: Address, call: Address, steps: range, width: int) -> Tensor:
        """Integers in [0, high) per client; the bias of the multiply-shift is below high / 2**32."""
        words = self.bits(purpose, ids, iteration=iteration, call=call, steps=steps, width=width)
        return (words * high.to(torch.int64).view(-1, 1, 1)) >> 32

    def epochs(self, purpose: str, ids: Tensor, high: Tensor, *, iteration: Address, call: Address, steps: range, width: int) -> Tensor:
        """Like `integers`, without replacement: step s takes the places s * width and following of passes over range(high), each in an order of its own.
        `high` is on the host: how many passes there are depends on it."""
        places = range(steps.start * width, steps.stop * width)
        scales = torch.frexp(high.double()).exponent * (high > 1)  # who has one sample gets it every time
        kinds = scales.unique().tolist()
        if kinds and kinds[0] and len(kinds) == 1:
            return self._passes(purpose, ids, high, places, iteration, call).view(len(ids), len(steps), width)
        out = torch.zeros(len(ids), len(places), dtype=torch.int64, device=ids.device)
        for scale in filter(None, kinds):  # clients of about the same size at once, or the passes of a small one would be as long as a large one's
            rows = (scales == scale).nonzero()[:, 0]
            out[rows.to(ids.device)] = self._passes(purpose, ids[rows.to(ids.device)], high[rows], places, iteration, call)
        return out.view(len(ids), len(steps), width)

    def _passes(self, purpose: str, ids: Tensor, high: Tensor, places: range, iteration: Address, call: Address) -> Tensor:
        longest, shortest = int(high.max()), int(high.min())
        passes = range(places.start // longest, (places.stop - 1) // shortest + 1)
        words = self.bits(f"{purpose}/order", ids, iteration=iteration, call=call, steps=passes, width=2 * longest).view(len(ids), len(passes), longest, 2)
        place, keys, each = torch.arange(places.start, places.stop, device=ids.device), _keys(words), torch.full((1, 1), longest, device=ids.device)
        if shortest < longest:
            each = high.to(ids.device)[:, None]
            keys = keys.masked_fill(torch.arange(longest, device=ids.device) >= each[..., None], 2**63 - 1)  # what a client does not have comes last
        orders = keys.argsort(dim=-1, stable=True)
        return orders[torch.arange(len(ids), device=ids.device)[:, None], place // each - passes.start, place % each]

    def order(self, purpose: str, client: int, num: int, *, iteration: int, call: int = 0) -> Tensor:
        """A permutation of range(num): sort 63-bit keys, ties (one in 2**63) by position."""
        ids = torch.tensor([client])
        words = self.bits(purpose, ids, iteration=iteration, call=call, steps=range(1), width=2 * num).view(num, 2)
        return _keys(words).argsort(stable=True)


def _keys(words: Tensor) -> Tensor:
    """Pairs of words as 63-bit numbers."""
    return (words[..., 0] >> 1 << 32) | words[..., 1]
