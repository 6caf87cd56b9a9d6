"""Plain kernels of layers whose fast kernels have no second derivative."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fedbilevel.problem.attention import attention


class WrittenAttention(TorchFunctionMode):
    """Attention in plain operations, because torch's own has no derivatives in bfloat16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func is not functional.multi_head_attention_forward:
            return func(*args, **kwargs)
        before = functional.scaled_dot_product_attention
        if before is scaled_dot_product_attention:  # otherwise it is that of `dropout`, in plain operations too
            functional.scaled_dot_product_attention = attention  # a mode does not see what torch's functions call
        try:
            return func(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = before


def _attention() -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel  # a problem without attention does not need it

    return sdpa_kernel(SDPBackend.MATH)


def _recurrent() -> AbstractContextManager[Any]:
    return torch.backends.cudnn.flags(enabled=False)


_PLAIN = {"attention": _attention, "recurrent": _recurrent}
_SIGNS = {  # part of torch's error message about a fast kernel -> name of the plain one
    "scaled_dot_product": "attention",
    "expected scalar type": "attention",  # in low precision
    "cudnn_rnn": "recurrent",
    "data pointer of Tensor that doesn't have storage": "recurrent",  # cuDNN under torch.func
}


def needed(errors: Iterable[Exception | str]) -> frozenset[str]:
    """Return the names of the plain kernels that may avoid the errors or warnings."""
    return frozenset(name for error in errors for sign, name in _SIGNS.items() if sign in str(error))


def plain(function: Callable[..., Any], names: Collection[str], *, low: bool = False) -> Callable[..., Any]:
    """Return a function that uses the plain kernels with these names.

    low: whether the function is evaluated in low precision.
    """
    if not names:
        return function
    kernels = {**_PLAIN, **({"attention": WrittenAttention} if low else {})}

    def within(*given: Any) -> Any:
        with ExitStack() as stack:
            for name in sorted(names):
                stack.enter_context(kernels[name]())
            return function(*given)

    return within
