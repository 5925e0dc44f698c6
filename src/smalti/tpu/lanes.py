"""The shape of a vector register: of 32-bit elements."""

LANES = 128
SUBLANES = 8


def round_up(n: int, multiple: int = LANES) -> int:
    return -(-n // multiple) * multiple
