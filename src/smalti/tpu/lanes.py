"""The lanes of a vector register."""

LANES = 128


def round_up(n: int, multiple: int = LANES) -> int:
    return -(-n // multiple) * multiple
