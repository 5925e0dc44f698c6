"""The walk visits each live tile once, and calls a chunk whole only if it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti import BlockSizes, masks
from smalti.attention.blockwise.walk import plan
from smalti.masks.mask_mod import as_mask


def visible_pairs(mask, batch, heads, q_len, kv_len):
    b, h, q, k = np.ix_(range(batch), range(heads), range(q_len), range(kv_len))
    return np.broadcast_to(np.asarray(mask(b, h, q, k)), (batch, heads, q_len, kv_len))


def visits(walk, group):
    """How often each (batch entry, query head, query, key) is visited, and how often in chunks
    called whole; over the padded lengths."""
    grid = walk.grid
    shape = (
        grid.batch,
        grid.heads,
        grid.num_q * grid.block_q,
        grid.num_kv * grid.block_kv,
    )
    seen, whole = np.zeros(shape, int), np.zeros(shape, int)
    for r in range(len(walk.row_q)):
        b = slice(walk.row_batch[r], walk.row_batch[r] + walk.num_b)
        h = slice(walk.row_head[r] * group, (walk.row_head[r] + walk.num_h) * group)
        q = slice(walk.row_q[r] * grid.block_q, (walk.row_q[r] + 1) * grid.block_q)
        for c in range(walk.row_start[r], walk.row_stop[r]):
            for tile in (t for t in np.asarray(walk.tiles)[c] if t < grid.num_kv):
                k = slice(tile * grid.block_kv, (tile + 1) * grid.block_kv)
                seen[b, h, q, k] += 1
                whole[b, h, q, k] += int(walk.whole[c])
    return seen, whole


MASKS = {
    "full": lambda rng, b, q, k: masks.full(),
    "causal": lambda rng, b, q, k: masks.causal(),
    "window": lambda rng, b, q, k: masks.sliding_window(int(rng.integers(1, 20))),
    "streaming": lambda rng, b, q, k: masks.streaming(sinks=3, window=5),
    "nobody": lambda rng, b, q, k: ~masks.full(),
    "document": lambda rng, b, q, k: masks.document(
        (np.sort(rng.integers(-1, 4, (b, q)), 1), np.sort(rng.integers(-1, 4, (b, k)), 1))
    ),
    "by head": lambda rng, b, q, k: as_mask(lambda b, h, q, k: (q + k) % (h + 2) == 0),
    "array": lambda rng, b, q, k: as_mask(rng.random((b, 1, q, k)) < 0.1),
}


@pytest.mark.parametrize(
    ("name", "traced"), [*((name, False) for name in MASKS), ("document", True), ("by head", True)]
)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_each_live_tile_once(name, traced, data):
    q_len, kv_len = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    sizes = BlockSizes(data.draw(st.integers(1, 16)), data.draw(st.integers(1, 16)))
    group, batch = data.draw(st.sampled_from([1, 2])), 2
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    mask = MASKS[name](rng, batch, q_len, kv_len).bind(batch, 2 * group, q_len, kv_len)

    def make(mask):
        return plan(
            mask,
            batch=batch,
            heads=2 * group,
            kv_heads=2,
            q_len=q_len,
            kv_len=kv_len,
            block_sizes=sizes,
        )

    walk = jax.jit(make)(mask) if traced else make(mask)
    seen, whole = visits(jax.tree.map(np.asarray, walk), group)
    pairs = visible_pairs(mask, batch, 2 * group, q_len, kv_len)
    seen_real, whole_real = seen[:, :, :q_len, :kv_len], whole[:, :, :q_len, :kv_len]
    assert seen.max(initial=0) <= 1
    assert (seen_real[pairs] == 1).all()
    assert pairs[whole_real == 1].all()
    padding = np.ones(seen.shape, bool)
    padding[:, :, :q_len, :kv_len] = False
    assert not whole[padding].any()


def test_dead_tiles_are_not_visited():
    walk = plan(
        masks.sliding_window(256).bind(1, 1, 4096, 4096),
        batch=1,
        heads=1,
        kv_heads=1,
        q_len=4096,
        kv_len=4096,
        block_sizes=None,
    )
    # 256 keys back from any of 128 queries: three tiles of 128, less at the start.
    assert walk.grid.block_q == walk.grid.block_kv == 128
    assert (walk.tiles < walk.grid.num_kv).sum() == 3 * 32 - 3


@pytest.mark.parametrize(("block_q", "block_kv"), [(64, 64), (128, 256), (100, 60), (512, 512)])
def test_block_mask_of_any_size_covers_its_mask(block_q, block_kv):
    mask = masks.build_block_mask(
        masks.streaming(sinks=2, window=70), 1, 1, 700, 700, block_q, block_kv
    )
    walk = plan(mask, batch=1, heads=1, kv_heads=1, q_len=700, kv_len=700, block_sizes=None)
    seen, whole = visits(walk, 1)
    pairs = visible_pairs(mask.mask, 1, 1, 700, 700)
    assert (seen[:, :, :700, :700][pairs] == 1).all()
    assert pairs[whole[:, :, :700, :700] == 1].all()


def test_traced_and_known_masks_agree():
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (2, 300)), 1)

    def run(ids):
        mask = (masks.document(ids) & masks.causal()).bind(2, 2, 300, 300)
        sizes = BlockSizes(128, 256)
        args = {"batch": 2, "heads": 2, "kv_heads": 2, "q_len": 300, "kv_len": 300}
        return plan(mask, **args, block_sizes=sizes)

    known, traced = run(ids), jax.tree.map(np.asarray, jax.jit(run)(jnp.asarray(ids)))
    for a, b in zip(visits(known, 1), visits(traced, 1), strict=True):
        np.testing.assert_array_equal(a, b)
