"""The order in which tiles are filled and used: every tile once, and no slot overwritten in use."""

import itertools
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from smalti.attention.tpu import pipeline
from smalti.attention.tpu.tiles import Blocks, Part, TileClass, Walk
from tests.attention.tpu.walks import NOTHING_HELD

CLASSES = [(Part(0, 128, 0, 128),), (Part(0, 128, 0, 128, band=(None, 0)),), (Part(0, 8, 0, 8),)]


class Fake:
    """Loops and conditions that run at once, and slots that remember what is in them."""

    def __init__(self):
        self.slots = {}
        self.used = []
        self.filled = []

    def fill(self, t, slot, parts):
        assert slot in (0, 1)
        self.slots[slot] = (int(t), parts)
        self.filled.append(int(t))

    def use(self, t, slot, parts):
        assert self.slots[slot] == (int(t), parts), f"slot {slot} holds {self.slots[slot]}"
        self.used.append((int(t), parts))

    def run(self, walk, tiles, i=0):
        def fori_loop(start, stop, body, carry):
            for i in range(start, stop):
                carry = body(i, carry)
            return carry

        def when(condition):
            return lambda body: body() if condition else None

        with (
            mock.patch.object(pipeline.lax, "fori_loop", fori_loop),
            mock.patch.object(pipeline.lax, "min", min),
            mock.patch.object(pipeline.pl, "when", when),
        ):
            pipeline.run(walk, tiles, SimpleNamespace(i=i), self.fill, self.use)


def walk_of(tiles, *lists, streamed=False, alone=False):
    blocks = Blocks(128, 128, 128, 128, 128, streamed=streamed)
    return Walk(
        lists=tiles, **NOTHING_HELD, classes=lists, blocks=blocks, q_len=128, kv_len=128,
        entries=(1, 1), empty_rows=False, empty_in_bands=False,
        one_tile_per_query=alone,
    )  # fmt: skip


def classes_of(counts):
    return tuple(TileClass(parts, n) for parts, n in zip(CLASSES, counts, strict=False))


def check(fake, counts):
    expected = itertools.chain(*([parts] * n for parts, n in zip(CLASSES, counts, strict=False)))
    assert fake.used == list(enumerate(expected))


@pytest.mark.parametrize(
    ("count", "streamed", "alone", "expected"),
    [
        (4, True, False, (4, False)),
        (5, True, False, (1, True)),
        (6, True, False, (2, True)),
        (9, False, False, (9, False)),
        (10, False, False, (2, True)),
        # Turns are of four, which share no sums.
        (4, True, True, (4, False)),
        (5, True, True, (1, True)),
        (6, True, True, (2, True)),
        (8, True, True, (4, True)),
        (9, True, True, (1, True)),
        (9, False, True, (9, False)),
        (12, False, True, (4, True)),
        (13, False, True, (1, True)),
    ],
)
def test_how_many_tiles_are_written_out(count, streamed, alone, expected):
    walk = walk_of(None, (TileClass(CLASSES[0], count),), streamed=streamed, alone=alone)
    assert pipeline.written_out(walk) == expected


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("count", range(21))
def test_one_class_of_known_count(count, streamed, alone):
    fake = Fake()
    classes = (TileClass(CLASSES[0], count),)
    fake.run(walk_of(None, classes, streamed=streamed, alone=alone), None)
    check(fake, [count])
    assert fake.filled == list(range(count)), "each is filled once"


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("counts", list(itertools.product((1, 2, 9, 10, 11, 20), repeat=2)))
@pytest.mark.parametrize("last", [0, 1, 12])
def test_several_classes_of_known_counts(counts, last, alone):
    counts = [*counts, *([last] if last else [])]
    fake = Fake()
    fake.run(walk_of(None, classes_of(counts), alone=alone), None)
    check(fake, counts)
    assert fake.filled == list(range(sum(counts)))


@pytest.mark.parametrize("whole", range(21))
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 8, 9])
def test_counts_that_only_the_kernel_knows(whole, cut):
    tiles = np.zeros((1, 2 + 32), np.int32)
    tiles[0, :2] = whole, cut
    fake = Fake()
    fake.run(walk_of(tiles, classes_of([None, None])), tiles)
    check(fake, [whole, cut])
    assert set(fake.filled) == set(range(whole + cut)), "nothing past the end of a list is read"


@pytest.mark.parametrize("i", [0, 1, 2])
def test_each_major_block_of_queries_walks_its_own_list(i):
    counts = [[12, 1], [], [3]]
    fake = Fake()
    fake.run(walk_of(None, *map(classes_of, counts)), None, i)
    check(fake, counts[i])


def test_a_walk_without_tiles():
    fake = Fake()
    fake.run(walk_of(None, ()), None)
    assert fake.used == fake.filled == []
