"""torch's compiler, imported when somebody compiles.

`torch.func.grad` imports it only to turn compiled autograd off: 70 MB and a second of every
process.

Nobody can have turned that on before the compiler was imported, so until then there is nothing to
turn off.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch

_OFF = SimpleNamespace(_disable=contextlib.nullcontext)


class _Postponed:
    """Stands for `torch._dynamo` until that is imported, which puts the real one in its place."""

    @property
    def compiled_autograd(self) -> Any:
        return sys.modules.get("torch._dynamo.compiled_autograd", _OFF)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


def postpone() -> None:
    """Let torch.func do without the compiler until somebody imports it."""
    if "torch._dynamo" not in sys.modules:
        setattr(torch, "_dynamo", _Postponed())  # noqa: B010 - as a plain assignment it is an error of types
