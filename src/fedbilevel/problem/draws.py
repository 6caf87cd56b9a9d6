"""Addressed randomness: every draw is a pure function of its address, never of earlier draws.

The stream is Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011). Key = (seed, purpose); counter = (position, call and step, outer iteration, client).
Therefore a client draws the same numbers whether it is alone in its process or hosted with a
thousand others, in any order, and after a resume.
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
from fedbilevel.problem.fused_draws import fused

SERVER = 2**32 - 1  # client number of the server's draws
_MASK = 0xFFFFFFFF
MAX_STEPS = 2**16  # steps share a counter word with the call number
Address = int | Tensor  # a tensor with one number where a captured phase is replayed


def _word(value: int, purpose: str) -> int:
    if not 0 <= value <= _MASK:
        raise SettingError(f"{purpose} must lie between 0 and 2**32 - 1, got {value}.")
    return value


def philox(key: tuple[int, int], counter: tuple[Any, Any, Any, Any]) -> tuple[Any, ...]:
    """Apply ten rounds of Philox to int64 tensors or arrays of uint32 words.

    Products wrap modulo 2**64 on purpose. A word that is constant along an axis of the counter may
    have length one there, which makes the first rounds cheap.
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

    `ids` are client numbers with one row of draws each. A row never depends on other rows of a
    call.
    """

    def __init__(self, seed: int) -> None:
        try:
            self.seed = _word(operator.index(seed), "seed")
        except TypeError:
            raise SettingError(f"seed is {seed!r}, expected a whole number.") from None

    def bits(self, purpose: str, ids: Tensor, *, iteration: Address, call: Address, steps: range, width: int) -> Tensor:
        """Return uniform 32-bit words (k, len(steps), width) as int64."""
        self._check(iteration, call, steps)
        return self._drawn(purpose, ids, None, iteration, call, steps, width)

    def _check(self, iteration: Address, call: Address, steps: range) -> None:
        if steps.stop > MAX_STEPS or (isinstance(call, int) and call >= MAX_STEPS):
            raise SettingError(
                f"step {steps.stop} of call {call} was requested, expected at most {MAX_STEPS} steps per phase and "
                "phases per outer iteration."
            )
        if isinstance(iteration, int):
            _word(iteration, "the outer iteration")

    def _drawn(
        self,
        purpose: str,
        ids: Tensor,
        high: Tensor | None,
        iteration: Address,
        call: Address,
        steps: range,
        width: int,
    ) -> Tensor:
        """Return words, or integers below `high`: on a GPU from one kernel, if there is a compiler."""

        def slow(
            ids: Tensor, high: Tensor | None, iteration: Address, call: Address, steps: range, width: int
        ) -> Tensor:
            words = self._words(purpose, ids, (iteration,), steps, call, width)
            return words if high is None else (words * high.to(torch.int64).view(-1, 1, 1)) >> 32

        if ids.is_cuda:
            key = (self.seed, zlib.crc32(purpose.encode()))
            found = fused(key, ids, high, iteration, call, steps, width, slow)
            if found is not None:
                return found
        return slow(ids, high, iteration, call, steps, width)

    def first_bits(self, purpose: str, ids: Tensor, *, iterations: range, width: int) -> Tensor:
        """Return `bits` (k, len(iterations), width) of call 0 and step 0 of each outer iteration.

        Several iterations cost little more than one.
        """
        for end in (iterations.start, iterations.stop - 1):
            _word(end, "the outer iteration")
        return self._words(purpose, ids, iterations, range(1), 0, width)

    def _words(
        self, purpose: str, ids: Tensor, iterations: Sequence[Address], steps: range, call: Address, width: int
    ) -> Tensor:
        """Return words (k, len(iterations) * len(steps), width); one of the two lengths must be 1.

        The parts of the counter vary along different axes, which the first rounds broadcast.
        """
        plain = isinstance(call, int) and not isinstance(iterations[0], Tensor)
        numpy = ids.device.type == "cpu" and plain  # four times faster on small arrays
        xp: Any
        there: dict[str, Any]
        xp, here, there = (np, ids.numpy(), {}) if numpy else (torch, ids, {"device": ids.device})
        when = (
            iterations[0].view(1, 1, 1)
            if isinstance(iterations[0], Tensor)
            else xp.asarray(iterations, **there).reshape(1, -1, 1)
        )
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
        """Return integers in [0, high) per client.

        The bias of multiply-shift is below high / 2**32.
        """
        self._check(iteration, call, steps)
        return self._drawn(purpose, ids, high, iteration, call, steps, width)

    def integer(self, purpose: str, client: int, high: int, *, iteration: int, call: int) -> int:
        """Return the first of `integers` for one client, without arrays."""
        self._check(iteration, call, range(1))
        key = (self.seed, zlib.crc32(purpose.encode()))
        return int(philox(key, (0, call << 16, iteration, client))[0] * high >> 32)

    def epochs(
        self, purpose: str, ids: Tensor, high: Tensor, *, iteration: Address, call: Address, steps: range, width: int
    ) -> Tensor:
        """Draw like `integers`, but without replacement.

        Each pass over range(high) is in a random order. Step s takes `width` entries of the joined
        passes, from entry s * width on. `high` is on the host, because the number of passes depends
        on it.
        """
        places = range(steps.start * width, steps.stop * width)
        scales = torch.frexp(high.double()).exponent * (high > 1)  # a client with one sample draws it every time
        kinds = scales.unique().tolist()
        if kinds and kinds[0] and len(kinds) == 1:
            return self._passes(purpose, ids, high, places, iteration, call).view(len(ids), len(steps), width)
        out = torch.zeros(len(ids), len(places), dtype=torch.int64, device=ids.device)
        for scale in filter(None, kinds):  # clients of similar sizes together, so that passes are short
            rows = (scales == scale).nonzero()[:, 0]
            out[rows.to(ids.device)] = self._passes(
                purpose, ids[rows.to(ids.device)], high[rows], places, iteration, call
            )
        return out.view(len(ids), len(steps), width)

    def epochs_within(
        self, purpose: str, ids: Tensor, high: Tensor, bounds: tuple[int, int], *,
        iteration: Address, call: Address, steps: range, width: int,
    ) -> Tensor:  # fmt: skip
        """Draw like `epochs` for numbers that only a device knows.

        bounds: the smallest of these numbers above one, and the largest.
        """
        places = range(steps.start * width, steps.stop * width)
        drawn = self._passes(purpose, ids, high.clamp(min=bounds[0]), places, iteration, call, bounds)
        return torch.where(high[:, None] > 1, drawn, 0).view(len(ids), len(steps), width)

    def _passes(
        self, purpose: str, ids: Tensor, high: Tensor, places: range, iteration: Address, call: Address,
        bounds: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        shortest, longest = bounds or (int(high.min()), int(high.max()))
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
            absent = torch.arange(longest, device=ids.device) >= each[..., None]
            keys = keys.masked_fill(absent, 2**63 - 1)  # samples that a client does not have come last
        orders = keys.argsort(dim=-1, stable=True)
        return orders[torch.arange(len(ids), device=ids.device)[:, None], place // each - passes.start, place % each]

    def order(
        self, purpose: str, client: int, num: int, *, iteration: int, call: int = 0, first: int | None = None
    ) -> Tensor:
        """Return a random permutation of range(num), by sorting 63-bit keys.

        Ties, which have probability 2**-63, are sorted by position.

        first: number of entries to return; fewer entries are cheaper.
        """
        ids = torch.tensor([client])
        words = self.bits(purpose, ids, iteration=iteration, call=call, steps=range(1), width=2 * num).view(num, 2)
        keys = _keys(words)
        if first is None or first >= num:
            return keys.argsort(stable=True)
        near = (keys <= keys.kthvalue(first).values).nonzero()[:, 0]  # one more than requested where the last is tied
        return near[keys[near].argsort(stable=True)[:first]]

    def orders(self, purpose: str, client: int, num: int, *, iterations: range, calls: range, first: int) -> Tensor:
        """Return `order` of every outer iteration and, within it, every call: one row each."""
        self._check(iterations.stop - 1, calls.stop - 1, range(1))
        if len(iterations) == len(calls) == 1:  # without a sort of everybody
            return self.order(purpose, client, num, iteration=iterations[0], call=calls[0], first=first)[None]
        when, call = (one.reshape(-1, 1) for one in np.meshgrid(np.array(iterations), np.array(calls), indexing="ij"))
        blocks = np.arange(-(-2 * num // 4)).reshape(1, -1)
        key = (self.seed, zlib.crc32(purpose.encode()))
        words = np.stack(np.broadcast_arrays(*philox(key, (blocks, call << 16, when, np.array([[client]])))), -1)
        pairs = torch.as_tensor(words).view(len(when), -1)[:, : 2 * num].reshape(len(when), num, 2)
        return _keys(pairs).argsort(dim=-1, stable=True)[:, :first]

    def divided(self, purpose: str, client: int, num: int, share: float, *, least: int = 0) -> tuple[Tensor, Tensor]:
        """Divide range(num) at random; return the main part and the part of a given share, sorted.

        share: size of the second part, as a share of num; the first part keeps at least one number.
        least: smallest size of the second part, where num allows it.
        """
        size = max(0, min(num - 1, max(least, round(share * num))))
        order = self.order(purpose, client, num, iteration=0)
        return order[size:].sort()[0], order[:size].sort()[0]


def _keys(words: Tensor) -> Tensor:
    """Join pairs of words into 63-bit numbers."""
    return (words[..., 0] >> 1 << 32) | words[..., 1]
