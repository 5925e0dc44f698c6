"""Where XLA puts the elements of an operand, by hand; test_compiled.py asks the compiler."""

import numpy as np
import pytest

from smalti.estimate.simulate.tiling import smem_words


def test_words_of_32_bits_row_by_row():
    words = smem_words(np.arange(6, dtype=np.int32).reshape(2, 3) - 1)
    assert len(words) == 2 * 128
    assert words[:4] == [2**32 - 1, 0, 1, None]
    assert words[128:132] == [2, 3, 4, None]


def test_rows_beyond_eight_and_columns_beyond_128_are_further_tiles():
    table = np.arange(9 * 130, dtype=np.int32).reshape(9, 130)
    words = smem_words(table)
    assert len(words) == 2 * 2 * 8 * 128
    # Row r, column c: tile (r // 8, c // 128), in it row r % 8 and column c % 128.
    for r, c in ((0, 127), (0, 128), (7, 0), (8, 0), (8, 129)):
        place = ((r // 8 * 2 + c // 128) * 8 + r % 8) * 128 + c % 128
        assert words[place] == table[r, c]


def test_bytes_four_rows_to_a_word():
    table = np.array([[1, 2], [3, 4], [-1, 6]], np.int8)
    words = smem_words(table)
    assert len(words) == 128
    assert words[:3] == [0x00FF0301, 0x00060402, None]


def test_a_vector_of_bytes_stands_as_four_rows_of_128():
    words = smem_words((np.arange(513) % 100).astype(np.int8))
    assert len(words) == 2 * 128
    assert words[1] == 1 | 29 << 8 | 57 << 16 | 85 << 24
    assert words[128:130] == [12, None]
    assert smem_words(np.array([True, False, True])) == [1, 0, 1, *[None] * 125]


def test_halves_two_rows_to_a_word():
    assert smem_words(np.array([[1, 2], [3, -4]], np.int16))[:2] == [0x00030001, 0xFFFC0002]


def test_leading_dimensions_follow_one_another():
    table = np.arange(32, dtype=np.int32).reshape(2, 4, 4)
    words = smem_words(table)
    assert [w for w in words if w is not None] == list(range(32))
    assert words[512] == 16


def test_words_of_64_bits_are_refused():
    text = "operands of int64 are not read from SMEM; 32-bit ones are"
    with pytest.raises(ValueError, match=f"^{text}$"):
        smem_words(np.arange(3))
