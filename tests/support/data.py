"""Small files in the formats of real data sets."""

import struct

import numpy as np


def write_idx(folder, stem, pixels, labels):
    for what, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        (folder / f"{stem}-{what}-ubyte").write_bytes(
            struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
        )
