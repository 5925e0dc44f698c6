"""How XLA lays an array out in a TPU's memory, as far as scalars in SMEM go.

Integer operands that a kernel reads from SMEM stand in tiles: of 32-bit words row by row, of 8- and
16-bit elements with as many rows packed into a word as fit, so that `T(4,128)(4,1)` puts four rows
of a column into one word.
"""

import math

import numpy as np


def smem_words(array: np.ndarray) -> list[int]:
    """The 32-bit words, as ints from 0, that a copy of `array` brings into SMEM.

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
    if array.ndim == 1:
        columns, lead = array.shape[0], 1
        # A vector is packed as if it were `packing` rows of 128.
        tile = 128 * packing
        padded = np.zeros(math.ceil(columns / tile) * tile, array.dtype)
        padded[:columns] = array
        grid = padded.reshape(-1, packing, 128).swapaxes(1, 2)
        return _words(grid.reshape(-1, packing))
    *outer, rows, columns = array.shape
    lead = math.prod(outer)
    height = next((h for h in (1, 2, 4, 8) if h >= min(rows, 8)), 8)
    height = max(height, packing)
    tall, wide = math.ceil(rows / height), math.ceil(columns / 128)
    padded = np.zeros((lead, tall * height, wide * 128), array.dtype)
    padded[:, :rows, :columns] = array.reshape(lead, rows, columns)
    # [lead, tall, height / p, p, wide, 128] → [lead, tall, wide, height / p, 128, p]
    grid = padded.reshape(lead, tall, height // packing, packing, wide, 128)
    return _words(grid.transpose(0, 1, 4, 2, 5, 3).reshape(-1, packing))


def _words(packed: np.ndarray) -> list[int]:
    """`[words, elements of a word]` as 32-bit words, the first element lowest."""
    return np.ascontiguousarray(packed).reshape(-1).view("<u4").tolist()
