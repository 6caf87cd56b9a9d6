"""Addressed randomness: every draw is a pure function of where it is used, never of what was drawn
before.

The stream is Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011). Key = (seed, purpose); counter = (position, call and step, outer iteration, client). A
client therefore draws the same numbers whether it is alone in its process or hosted with a thousand
others, in any order, and after a resume.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Sequence
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
    """Ten rounds on int64 tensors or arrays that hold uint32 words; products wrap modulo 2**64,
    which is what is wanted.

    Words that stand for a whole axis of the counter may have length one there: the first rounds
    then cost little.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


class Stream:
    """Draws for one seed.

    `ids` are client numbers, one row each; the result never depends on which rows are asked
    together.
    """

    def __init__(self, seed: int) -> None:
        try:
            self.seed = _word(operator.index(seed), "seed")
        except TypeError:
            raise SettingError(f"seed is {seed!r}, expected a whole number.") from None

    def bits(self, purpose: str, ids: Tensor, *, iteration: Address, call: Address, steps: range, width: int) -> Tensor:
        """Uniform 32-bit words, (k, len(steps), width), as int64."""
        if steps.stop > MAX_STEPS or (isinstance(call, int) and call >= MAX_STEPS):
            raise SettingError(
                f"step {steps.stop} of call {call} was asked for, expected at most {MAX_STEPS} steps per phase and "
                "phases per outer iteration."
            )
        if isinstance(iteration, int):
            _word(iteration, "the outer iteration")
        return self._words(purpose, ids, (iteration,), steps, call, width)

    def first_bits(self, purpose: str, ids: Tensor, *, iterations: range, width: int) -> Tensor:
        """(k, len(iterations), width): what `bits` gives for call 0 and step 0 of each of these
        outer iterations; a draw costs little more for several.
        """
        for end in (iterations.start, iterations.stop - 1):
            _word(end, "the outer iteration")
        return self._words(purpose, ids, iterations, range(1), 0, width)

    def _words(
        self, purpose: str, ids: Tensor, iterations: Sequence[Address], steps: range, call: Address, width: int
    ) -> Tensor:
        """(k, len(iterations) * len(steps), width), one of these two being 1: the counter's parts
        vary along different axes, and meet in the first rounds.
        """
        numpy = ids.device.type == "cpu" and isinstance(
            call, int
        )  # on small arrays, which these are, it takes a quarter of the time
        xp: Any
        there: dict[str, Any]
        xp, here, there = (np, ids.numpy(), {}) if numpy else (torch, ids, {"device": ids.device})
        when = iterations[0] if isinstance(iterations[0], Tensor) else xp.asarray(iterations, **there).reshape(1, -1, 1)
        step = (xp.arange(steps.start, steps.stop, **there) + (call << 16)).reshape(1, -1, 1)
        blocks, num = -(-width // 4), len(iterations) * len(steps)
        words = philox(
            (self.seed, zlib.crc32(purpose.encode())),
            (xp.arange(blocks, **there).reshape(1, 1, -1), step, when, here.reshape(-1, 1, 1)),
        )
        out = xp.stack([xp.broadcast_to(word, (len(ids), num, blocks)) for word in words], -1).reshape(
            len(ids), num, 4 * blocks
        )
        return torch.as_tensor(out[..., :width])

    def integers(
        self, purpose: str, ids: Tensor, high: Tensor, *, iteration: Address, call: Address, steps: range, width: int
    ) -> Tensor:
        """Integers in [0, high) per client; the bias of the multiply-shift is below high / 2**32."""
        words = self.bits(purpose, ids, iteration=iteration, call=call, steps=steps, width=width)
        return (words * high.to(torch.int64).view(-1, 1, 1)) >> 32

    def epochs(
        self, purpose: str, ids: Tensor, high: Tensor, *, iteration: Address, call: Address, steps: range, width: int
    ) -> Tensor:
        """Like `integers`, without replacement: step s takes the places s * width and following of
        passes over range(high), each in an order of its own.

        `high` is on the host: how many passes there are depends on it.
        """
        places = range(steps.start * width, steps.stop * width)
        scales = torch.frexp(high.double()).exponent * (high > 1)  # who has one sample gets it every time
        kinds = scales.unique().tolist()
        if kinds and kinds[0] and len(kinds) == 1:
            return self._passes(purpose, ids, high, places, iteration, call).view(len(ids), len(steps), width)
        out = torch.zeros(len(ids), len(places), dtype=torch.int64, device=ids.device)
        for scale in filter(
            None, kinds
        ):  # clients of about the same size at once, or the passes of a small one would be as long as a large one's
            rows = (scales == scale).nonzero()[:, 0]
            out[rows.to(ids.device)] = self._passes(
                purpose, ids[rows.to(ids.device)], high[rows], places, iteration, call
            )
        return out.view(len(ids), len(steps), width)

    def _passes(
        self, purpose: str, ids: Tensor, high: Tensor, places: range, iteration: Address, call: Address
    ) -> Tensor:
        longest, shortest = int(high.max()), int(high.min())
        passes = range(places.start // longest, (places.stop - 1) // shortest + 1)
        words = self.bits(
            f"{purpose}/order", ids, iteration=iteration, call=call, steps=passes, width=2 * longest
        ).view(len(ids), len(passes), longest, 2)
        place, keys, each = (
            torch.arange(places.start, places.stop, device=ids.device),
            _keys(words),
            torch.full((1, 1), longest, device=ids.device),
        )
        if shortest < longest:
            each = high.to(ids.device)[:, None]
            keys = keys.masked_fill(
                torch.arange(longest, device=ids.device) >= each[..., None], 2**63 - 1
            )  # what a client does not have comes last
        orders = keys.argsort(dim=-1, stable=True)
        return orders[torch.arange(len(ids), device=ids.device)[:, None], place // each - passes.start, place % each]

    def order(
        self, purpose: str, client: int, num: int, *, iteration: int, call: int = 0, first: int | None = None
    ) -> Tensor:
        """A permutation of range(num): sort 63-bit keys, ties (one in 2**63) by position.

        `first`: only so many of its entries, which costs less.
        """
        ids = torch.tensor([client])
        words = self.bits(purpose, ids, iteration=iteration, call=call, steps=range(1), width=2 * num).view(num, 2)
        keys = _keys(words)
        if first is None or first >= num:
            return keys.argsort(stable=True)
        near = (keys <= keys.kthvalue(first).values).nonzero()[:, 0]  # one more than asked for where the last is tied
        return near[keys[near].argsort(stable=True)[:first]]


def _keys(words: Tensor) -> Tensor:
    """Pairs of words as 63-bit numbers."""
    return (words[..., 0] >> 1 << 32) | words[..., 1]
