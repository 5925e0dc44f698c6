"""Running a list of tiles as a software pipeline.

The products that give a tile's scores do not depend on the tile before. They are issued one tile
ahead, into one of two slots of VMEM, so that the matrix units have work while the vector units are
busy with the softmax. The compiler does not do this by itself: it does not look across the turns of
a loop. Slots are numbers at trace time, for it takes two turns to see that they do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from smalti.attention.tpu.tiles import Parts, TileClass, Walk

Step = Callable[[Any, int, Parts], None]  # (place in the list, slot, parts)

# A class of at most so many tiles is written out rather than looped over: the diagonal of 4096
# tokens, in tiles of 512 queries by 1024 keys, is two classes of four, that of 8192 two of eight.
# Written out it takes less time, but each tile that is streamed through the matrix units takes VMEM
# of its own for what it spills (docs/performance/dense-tpu.md).
STRAIGHT_HELD, STRAIGHT_STREAMED = 9, 4
CHUNKS = (2048, 1024, 512, 256, 128)  # tokens finished at a time: the first that divides
# Tiles in a turn of a loop, at least one for each slot; more where they share no sums, so that the
# compiler may mix them.
TURN, TURN_ALONE = 2, 4


def run(walk: Walk, tiles_ref, at, fill: Step, use: Step) -> None:
    """``fill`` and ``use`` every tile of a list in order, each filled one tile ahead.

    tiles_ref: int32 ``[1, counts + tiles]``; the counts are of the classes that do not know theirs.
    at: where the running step is; ``at.i`` says which of the lists it walks.
    """
    if walk.num_counts == 0:
        for n, classes in enumerate(walk.classes):

            @pl.when(True if len(walk.classes) == 1 else at.i == n)
            def _(classes=classes):
                _run_known(classes, walk, fill, use)

        return
    start = 0
    for n, tile_class in enumerate(walk.classes[0]):
        assert tile_class.count is None, tile_class
        _run_counted(tile_class.parts, start, tiles_ref[0, n], fill, use)
        start = start + tiles_ref[0, n]


def written_out(walk: Walk) -> tuple[int, bool]:
    """How many tiles are written out, of the list that has most, and whether there are loops. The
    body of one loop does not count; several of them do, where tiles are streamed."""
    if walk.num_counts:
        return 0, True
    most, loops = 0, False
    for classes in walk.classes:
        looped = [_turns(c.count or 0, walk) * _turn(walk) for c in classes]
        bodies = sum(n > 0 for n in looped) * _turn(walk) if walk.blocks.streamed else 0
        bodies = bodies if bodies > _turn(walk) else 0
        most = max(most, sum(c.count or 0 for c in classes) - sum(looped) + bodies)
        loops |= any(looped)
    return most, loops


def _turn(walk: Walk) -> int:
    return TURN_ALONE if walk.one_tile_per_query else TURN


def _turns(count: int, walk: Walk) -> int:
    """Of the loop over a class."""
    straight = STRAIGHT_STREAMED if walk.blocks.streamed else STRAIGHT_HELD
    return (count - 1) // _turn(walk) if count > straight else 0


def _run_known(classes: Sequence[TileClass], walk: Walk, fill: Step, use: Step) -> None:
    in_turn = _turn(walk)
    total = sum(c.count or 0 for c in classes)
    if total == 0:
        return
    fill(0, 0, classes[0].parts)
    place = slot = 0  # in the list
    for number, tile_class in enumerate(classes):
        count, parts = tile_class.count or 0, tile_class.parts

        def step(t, slot, next_parts=parts, parts=parts):
            if next_parts:
                fill(t + 1, 1 - slot, next_parts)
            use(t, slot, parts)

        if turns := _turns(count, walk):

            def body(turn, carry, place=place, slot=slot, step=step):
                for u in range(in_turn):
                    step(place + turn * in_turn + u, (slot + u) % 2)
                return carry

            lax.fori_loop(0, turns, body, None)
            place, count = place + turns * in_turn, count - turns * in_turn
        for left in range(count, 0, -1):
            following = classes[number + 1].parts if number + 1 < len(classes) else ()
            step(place, slot, parts if left > 1 else following)
            place, slot = place + 1, 1 - slot


def _run_counted(parts: Parts, start, count, fill: Step, use: Step) -> None:
    """A class whose count is known to the running kernel alone."""

    @pl.when(count > 0)
    def _():
        fill(start, 0, parts)

        def body(turn, carry):
            first = start + turn * TURN
            fill(first + 1, 1, parts)
            use(first, 0, parts)
            # The last turn of an even count fills a tile again that it does not need.
            fill(lax.min(first + 2, start + count - 1), 0, parts)
            use(first + 1, 1, parts)
            return carry

        lax.fori_loop(0, count // TURN, body, None)

        @pl.when(count % TURN == 1)
        def _():
            use(start + count - 1, 0, parts)


def in_chunks(length: int, finish: Callable[[Any], None]) -> None:
    """Call ``finish`` with slices that make up ``length`` tokens."""
    chunk = next(n for n in CHUNKS if length % n == 0)

    def body(n, carry):
        finish(pl.ds(pl.multiple_of(n * chunk, chunk), chunk))
        return carry

    lax.fori_loop(0, length // chunk, body, None)
