"""Addressed draws on a GPU as one kernel, with the bits of `draws.philox`.

The words of a draw take about a hundred kernels of integers as tensors. The kernel here is used only
after it has given the same words as these tensors, once per device; otherwise draws use the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # a build of torch without GPUs has no compiler of kernels
    triton = None

_BLOCK = 256
_TRUSTED: dict[torch.device, bool] = {}  # whether the kernel has proved itself on a device
Slow = Callable[..., Tensor]  # the same draw by tensors

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def, misc, unused-ignore]
        out, ids, high, when, call, key, first, num, width, blocks, total, SCALED: tl.constexpr, BLOCK: tl.constexpr
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < total
        block, row = at % blocks, at // blocks
        step, client = row % num, row // num
        c0 = block.to(tl.uint32)
        c1 = ((tl.load(call) << 16) + first + step).to(tl.uint32)
        c2 = (tl.load(when) + 0 * at).to(tl.uint32)
        c3 = tl.load(ids + client, mask=inside, other=0).to(tl.uint32)
        r0, r1, r2, r3 = tl.philox(tl.load(key), c0, c1, c2, c3, 10)
        many = tl.load(high + client, mask=inside, other=0)
        place = out + row * width + 4 * block
        left = width - 4 * block
        w0, w1 = r0.to(tl.int64) & 0xFFFFFFFF, r1.to(tl.int64) & 0xFFFFFFFF
        w2, w3 = r2.to(tl.int64) & 0xFFFFFFFF, r3.to(tl.int64) & 0xFFFFFFFF
        if SCALED:
            w0, w1, w2, w3 = (w0 * many) >> 32, (w1 * many) >> 32, (w2 * many) >> 32, (w3 * many) >> 32
        tl.store(place, w0, mask=inside & (left > 0))
        tl.store(place + 1, w1, mask=inside & (left > 1))
        tl.store(place + 2, w2, mask=inside & (left > 2))
        tl.store(place + 3, w3, mask=inside & (left > 3))


def fused(
    key: tuple[int, int], ids: Tensor, high: Tensor | None, when: Any, call: Any, steps: range, width: int, slow: Slow
) -> Tensor | None:
    """Return words (k, len(steps), width), or integers below `high`; None: use tensors.

    slow: the same draw by tensors, of (ids, high, when, call, steps, width), to compare with.
    """
    if triton is None or not ids.is_cuda or len(ids) == 0 or width == 0 or not steps:
        return None
    if ids.device not in _TRUSTED:
        if torch.cuda.is_current_stream_capturing():
            return None
        _TRUSTED[ids.device] = _is_right(key, ids.device, slow)
    return _launched(key, ids, high, when, call, steps, width) if _TRUSTED[ids.device] else None


def is_cheap(device: torch.device) -> bool:
    """Return whether a draw on the device is one kernel, or needs none; False until a draw has been tried."""
    return device.type != "cuda" or _TRUSTED.get(device, False)


def _is_right(key: tuple[int, int], device: torch.device, slow: Slow) -> bool:
    """Return whether the kernel gives the words of tensors, for large and small parts of an address."""
    ids = torch.tensor([0, 7, 2**31 + 5, 2**32 - 1], device=device)
    high, when = torch.tensor([1, 10, 2**20, 2**31], device=device), torch.tensor([2**31 + 3], device=device)
    try:
        for scale in (None, high):
            for width in (1, 4, 7):
                given = (ids, scale, when, 9, range(2, 5), width)
                if not torch.equal(_launched(key, *given), slow(*given)):
                    return False
    except Exception:  # noqa: BLE001 - a compiler may fail in any way, and tensors do the same
        return False
    return True


def _launched(
    key: tuple[int, int], ids: Tensor, high: Tensor | None, when: Any, call: Any, steps: range, width: int
) -> Tensor:
    number = lambda value: value.reshape(1) if isinstance(value, Tensor) else torch.full((1,), value, device=ids.device)
    blocks, num = -(-width // 4), len(steps)
    total = len(ids) * num * blocks
    out = torch.empty(len(ids), num, width, dtype=torch.int64, device=ids.device)
    joined = key[0] | key[1] << 32
    seed = torch.full((1,), joined - 2**64 if joined >= 2**63 else joined, device=ids.device)
    ids, scale = ids.contiguous(), ids if high is None else high.to(torch.int64).contiguous()
    with torch.cuda.device(ids.device):
        _kernel[(triton.cdiv(total, _BLOCK),)](
            out, ids, scale, number(when), number(call), seed, steps.start, num, width, blocks, total,
            SCALED=high is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return out
