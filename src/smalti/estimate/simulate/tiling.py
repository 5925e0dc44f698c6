"""How XLA lays an array out in a TPU's memory, as far as scalars in SMEM go.

Integer operands that a kernel reads from SMEM stand in tiles: of 32-bit words row by row, of 8- and
16-bit elements with as many rows packed into a word as fit, so that `T(4,128)(4,1)` puts four rows
of a column into one word.
"""

import math

import numpy as np


def smem_words(array: np.ndarray) -> list[int | None]:
    """The 32-bit words, as ints from 0, that a copy of `array` brings into SMEM; None for padding.

    Layouts are those that XLA gives to a scalar-prefetch operand: `T(128)` for 32-bit and
    `T(128·p)(128)(p,1)` for p-to-a-word elements in 1-D, `T(r,128)(p,1)` in more dimensions, where
    r is 1, 2, 4 or 8 rows: the least that holds them.
    """
    array = np.atleast_1d(np.asarray(array))
    if array.dtype == np.bool_:
        array = array.astype(np.int8)
    packing = 4 // array.dtype.itemsize
    if packing == 0:
        raise ValueError(f"operands of {array.dtype} are not read from SMEM; 32-bit ones are")
    # Where each element stands; -1 for padding.
    places = np.arange(array.size).reshape(array.shape)
    if array.ndim == 1:
        # A vector is packed as if it were `packing` rows of 128.
        tile = 128 * packing
        padded = np.full(math.ceil(array.size / tile) * tile, -1)
        padded[: array.size] = places
        packed = padded.reshape(-1, packing, 128).swapaxes(1, 2)
    else:
        *outer, rows, columns = array.shape
        lead = math.prod(outer)
        height = next((h for h in (1, 2, 4, 8) if h >= min(rows, 8)), 8)
        height = max(height, packing)
        tall, wide = math.ceil(rows / height), math.ceil(columns / 128)
        padded = np.full((lead, tall * height, wide * 128), -1)
        padded[:, :rows, :columns] = places.reshape(lead, rows, columns)
        # [lead, tall, height / p, p, wide, 128] → [lead, tall, wide, height / p, 128, p]
        grid = padded.reshape(lead, tall, height // packing, packing, wide, 128)
        packed = grid.transpose(0, 1, 4, 2, 5, 3)
    packed = packed.reshape(-1, packing)
    elements = np.where(packed < 0, 0, array.reshape(-1)[packed]).astype(array.dtype)
    words = elements.reshape(-1).view("<u4")
    padding = np.asarray((packed < 0).all(axis=1))
    return [None if empty else int(word) for word, empty in zip(words, padding, strict=True)]
