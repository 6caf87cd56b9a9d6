"""The format of messages: a header of plain values as JSON, and arrays as bytes with their type and
shape. Reading a message executes nothing.

    fedbilevel-1\\n | length of the header, 4 bytes | header | arrays, one after the other

Numbers are little-endian. The header lists the arrays under "arrays", each as [type, shape].
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.errors import WireError

MAGIC = b"fedbilevel-1\n"
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "int8": np.dtype("<i1"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
}
_LONGEST = 2**24  # bytes of a header
_MOST = 1000  # arrays of a message


def pack(header: Mapping[str, Any], arrays: Sequence[Tensor] = ()) -> bytes:
    plain = [array.detach().cpu().contiguous().numpy() for array in arrays]
    for array in plain:
        if str(array.dtype) not in DTYPES:
            raise WireError(f"an array of type {array.dtype} cannot be sent, expected one of {', '.join(DTYPES)}.")
    text = json.dumps(
        {**header, "arrays": [[str(array.dtype), list(array.shape)] for array in plain]},
        allow_nan=False,
        separators=(",", ":"),
    ).encode()
    content = [array.astype(DTYPES[str(array.dtype)], copy=False).tobytes() for array in plain]
    return b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *content])


def unpack(message: bytes) -> tuple[dict[str, Any], list[Tensor]]:
    """Read a message. Raise WireError, before memory is allocated, for anything that `pack` does
    not write."""
    if not isinstance(message, bytes) or not message.startswith(MAGIC) or len(message) < len(MAGIC) + 4:
        raise WireError(
            "a message begins like that of another version: install the same version of fedbilevel at all sites."
        )
    start = len(MAGIC) + 4
    end = start + int.from_bytes(message[len(MAGIC) : start], "little")
    if end > min(len(message), start + _LONGEST):
        raise WireError(f"a message announces a header of {end - start} bytes, which does not fit its length.")
    try:
        header = json.loads(message[start:end])
    except (ValueError, RecursionError) as error:
        raise WireError("the header of a message is not readable as JSON.") from error
    if not isinstance(header, dict) or not isinstance(header.get("arrays"), list):
        raise WireError("the header of a message is not a table with a list of arrays.")
    if len(header["arrays"]) > _MOST:
        raise WireError(f"a message announces {len(header['arrays'])} arrays, expected at most {_MOST}.")
    sizes = [_size(entry) for entry in header.pop("arrays")]
    if end + sum(size for _, _, size in sizes) != len(message):
        raise WireError(f"a message of {len(message)} bytes announces {end + sum(size for _, _, size in sizes)} bytes.")
    arrays = []
    for dtype, shape, size in sizes:
        flat = np.frombuffer(message, DTYPES[dtype], count=math.prod(shape), offset=end)
        arrays.append(torch.from_numpy(flat.astype(dtype)).view(shape))  # a copy, in this machine's byte order
        end += size
    return header, arrays


def _size(entry: Any) -> tuple[str, list[int], int]:
    if (
        not isinstance(entry, list)
        or len(entry) != 2
        or not isinstance(entry[0], str)
        or entry[0] not in DTYPES
        or not isinstance(entry[1], list)
        or len(entry[1]) > 2
    ):
        raise WireError(f"a message describes an array as {entry!r:.80}, expected a type and at most two lengths.")
    dtype, shape = entry
    if not all(isinstance(length, int) and not isinstance(length, bool) and 0 <= length < 2**40 for length in shape):
        raise WireError(f"a message describes an array of shape {shape!r:.80}, expected whole numbers.")
    return dtype, shape, math.prod(shape) * DTYPES[dtype].itemsize
