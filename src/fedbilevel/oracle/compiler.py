"""Postponed import of torch's compiler, until the compiler is used.

`torch.func.grad` imports the compiler only to turn compiled autograd off, which costs 70 MB and a
second in every process. Compiled autograd cannot be on before the compiler is imported, so until
then there is nothing to turn off.
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
    """Replacement of `torch._dynamo` until its import, which sets the real module."""

    @property
    def compiled_autograd(self) -> Any:
        return sys.modules.get("torch._dynamo.compiled_autograd", _OFF)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


def postpone() -> None:
    """Let torch.func work without the compiler until the compiler is imported."""
    if "torch._dynamo" not in sys.modules:
        setattr(torch, "_dynamo", _Postponed())  # noqa: B010 - mypy refuses a plain assignment
