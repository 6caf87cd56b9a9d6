"""Plain kernels of layers whose fast kernels have no second derivative."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch


def _attention() -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel  # a problem without attention does not need it

    return sdpa_kernel(SDPBackend.MATH)


def _recurrent() -> AbstractContextManager[Any]:
    return torch.backends.cudnn.flags(enabled=False)


_PLAIN = {"attention": _attention, "recurrent": _recurrent}
_SIGNS = {  # part of torch's error message about a fast kernel -> name of the plain one
    "scaled_dot_product": "attention",
    "cudnn_rnn": "recurrent",
    "data pointer of Tensor that doesn't have storage": "recurrent",  # cuDNN under torch.func
}


def needed(errors: Iterable[Exception | str]) -> frozenset[str]:
    """Return the names of the plain kernels that may avoid the errors or warnings."""
    return frozenset(name for error in errors for sign, name in _SIGNS.items() if sign in str(error))


def plain(function: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """Return a function that uses the plain kernels with these names."""
    if not names:
        return function

    def within(*given: Any) -> Any:
        with ExitStack() as stack:
            for name in sorted(names):
                stack.enter_context(_PLAIN[name]())
            return function(*given)

    return within
