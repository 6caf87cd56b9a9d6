"""Errors of torch in words of a loss."""

from __future__ import annotations

import re

from fedbilevel.errors import reason

_NO_DERIVATIVE = r"derivative for '?(?:aten::)?(\w+)'? is not implemented"
_WORDS = (  # message of torch -> its meaning for the author of a loss
    (r"\.item\(\)|data-dependent control flow", "it branches on values or calls .item()"),
    (r"dynamic shape", "a shape in it depends on values"),
    (r"Batching rule not implemented for aten::([a-z_]+)", r"torch has no batching rule for \1"),
    (r"saved tensor hooks", "it uses a checkpoint, which only gradients of one client at a time can"),
    (_NO_DERIVATIVE, r"torch has no derivative of \1"),
)


def plainly(error: Exception) -> str:
    """Describe an exception of a loss or of torch briefly."""
    for pattern, words in _WORDS:
        if found := re.search(pattern, str(error)):
            return found.expand(words)
    return reason(error)


def lacks_derivative(error: Exception) -> bool:
    return re.search(_NO_DERIVATIVE, str(error)) is not None
