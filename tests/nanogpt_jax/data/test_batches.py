from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanogpt_jax.data.batches import Batches, permute, validation_batches
from nanogpt_jax.data.shards import Shards, write_shard
from tests.nanogpt_jax.data.support import quick

SHAPES = st.tuples(
    st.integers(2, 120), st.integers(1, 12), st.integers(1, 9), st.integers(-(2**70), 2**70)
).filter(lambda shape: shape[0] > shape[1])


def make(shape, **more):
    """Tokens that are their own index, so that a batch says where it comes from."""
    n, seq_len, batch_size, seed = shape
    return Batches(np.arange(n, dtype=np.uint16), batch_size, seq_len, seed, **more)


@quick
@given(SHAPES, st.integers(1, 3))
def test_every_token_is_a_target_once_per_epoch(shape, epochs):
    n, seq_len, batch_size, _ = shape
    batches = make(shape)
    rows = batches.windows * epochs
    steps = -(-rows // batch_size)
    targets = np.concatenate([batches.batch(step)[1] for step in range(steps)])[:rows]
    left_over = (n - 1) % seq_len
    for epoch in targets.reshape(epochs, -1):
        # All but the first token and those that fill no window, at one end or the other.
        first = epoch.min()
        assert 1 <= first <= 1 + left_over
        assert sorted(epoch) == list(range(first, first + n - 1 - left_over))


@quick
@given(SHAPES, st.integers(0, 100))
def test_targets_are_the_next_tokens(shape, step):
    inputs, targets = make(shape).batch(step)
    assert inputs.dtype == targets.dtype == np.int32
    assert inputs.shape == targets.shape == (shape[2], shape[1])
    np.testing.assert_array_equal(targets, inputs + 1)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])


@quick
@given(SHAPES, st.integers(0, 100))
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_processes_divide_the_same_rows(count, shape, step):
    whole = make(shape)
    parts = [make(shape, process_index=p, process_count=count) for p in range(count)]
    for i in range(2):
        union = np.concatenate([part.batch(step)[i] for part in parts])
        np.testing.assert_array_equal(union, whole.batch(step)[i])
    assert [p for part in parts for p in part.positions(step)] == whole.positions(step)


@quick
@given(SHAPES, st.integers(0, 50), st.integers(0, 50))
def test_a_step_does_not_depend_on_what_came_before(shape, before, step):
    walked = make(shape)
    walked.batch(before)
    np.testing.assert_array_equal(walked.batch(step), make(shape).batch(step))


@quick
@given(SHAPES, st.integers(1, 4), st.integers(0, 20))
def test_steps_cut_one_line_of_rows(shape, accumulation, step):
    """A step of k·b rows has the rows of k steps of b rows: accumulation is a reshape."""
    n, seq_len, rows, seed = shape
    large = make((n, seq_len, rows * accumulation, seed)).batch(step)[0]
    small = [make(shape).batch(step * accumulation + a)[0] for a in range(accumulation)]
    np.testing.assert_array_equal(large.reshape(accumulation, rows, seq_len), small)


def test_known_rows():
    """Written down, so that no version of anything may change what a seed means."""
    starts = [p.token for p in Batches(np.zeros(1000, np.uint16), 6, 10, seed=7).positions(0)]
    assert starts == [448, 528, 408, 138, 628, 128]


def test_far_steps_and_numpy_integers():
    batches = make((300, 4, 8, 1))
    step = 10**12
    np.testing.assert_array_equal(batches.batch(step), batches.batch(np.int64(step)))


def test_epochs_and_seeds_differ():
    def order(epoch, seed):
        return permute(np.arange(1000), 1000, seed, epoch).tolist()

    orders = [order(0, 0), order(1, 0), order(0, 1), order(1, 1), order(0, -1)]
    assert len({tuple(o) for o in orders}) == 5
    # Two independent orders of 1000 agree in about one place.
    for i, a in enumerate(orders):
        for b in [list(range(1000)), *orders[:i]]:
            assert sum(x == y for x, y in zip(a, b, strict=True)) < 10


@quick
@given(st.integers(1, 700), st.integers(0, 2**64), st.integers(0, 1000))
def test_permute_is_a_permutation(size, seed, epoch):
    assert sorted(permute(np.arange(size), size, seed, epoch)) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 5, 16, 17])
def test_every_window_comes_first_equally_often(size):
    """Over 1000 seeds; the bound is six standard deviations of a fair draw."""
    seeds = 1000
    counts = Counter(int(permute(np.array([0]), size, seed, 0)[0]) for seed in range(seeds))
    p = 1 / size
    assert max(abs(counts[i] - seeds * p) for i in range(size)) < 6 * (seeds * p * (1 - p)) ** 0.5


def test_neighbours_part():
    """Windows next to each other in the text are not so in the order."""
    order = permute(np.arange(10_000), 10_000, 3, 0)
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.001
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def test_positions_name_document_and_offset():
    documents = [("hamlet", 0), ("macbeth", 100), ("othello", 101)]
    batches = make((302, 7, 64, 5), documents=documents)
    for step in range(3):
        inputs, _ = batches.batch(step)
        for row, position in zip(inputs, batches.positions(step), strict=True):
            assert row[0] == position.token
            first = dict(documents)[position.document]
            assert position.token == first + position.offset
            assert position.document == ("hamlet" if position.token < 100 else "othello") or (
                position.token == 100
            )
    assert str(batches.positions(0)[0]).startswith("epoch 0, window ")
    assert {p.epoch for p in batches.positions(1)} == {1, 2}


def test_shards_give_the_batches_of_an_array(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 99, 500).astype(np.uint16)
    for i, part in enumerate(np.split(tokens, [77, 78, 300])):
        write_shard(tmp_path / f"{i}.bin", part)
    shards = Shards(sorted(tmp_path.glob("*.bin")), 99)
    for step in range(5):
        np.testing.assert_array_equal(
            Batches(shards, 9, 16).batch(step), Batches(tokens, 9, 16).batch(step)
        )


@quick
@given(SHAPES, st.integers(1, 4))
def test_validation_takes_every_window_once_in_order(shape, count):
    n, seq_len, batch_size, _ = shape
    tokens = np.arange(n, dtype=np.uint16)
    rows = []
    batches = [
        validation_batches(tokens, batch_size, seq_len, process_index=p, process_count=count)
        for p in range(count)
    ]
    for parts in zip(*batches, strict=True):
        inputs, targets, weights = (np.concatenate(part) for part in zip(*parts, strict=True))
        assert inputs.shape == targets.shape == (batch_size, seq_len)
        assert weights.dtype == np.float32
        assert set(weights) <= {0.0, 1.0}
        np.testing.assert_array_equal(targets, inputs + 1)
        rows.extend(targets[weights == 1])
    assert np.concatenate(rows).tolist() == list(range(1, 1 + (n - 1) // seq_len * seq_len))


def test_validation_of_the_first_windows():
    tokens = np.arange(100, dtype=np.uint16)
    inputs, _, weights = zip(*validation_batches(tokens, 2, 10, windows=3), strict=True)
    assert np.concatenate(inputs)[:, 0].tolist() == [0, 10, 20, 0]
    assert np.concatenate(weights).tolist() == [1, 1, 1, 0]
    with pytest.raises(ValueError, match="windows: got 10, allowed is 1 to 9"):
        next(validation_batches(tokens, 2, 10, windows=10))


def test_too_few_tokens():
    text = "seq_len: got 10, but the training set has 10 tokens, and one window takes 11"
    with pytest.raises(ValueError, match=text):
        make((10, 10, 1, 0))
    with pytest.raises(ValueError, match="the validation set has 5 tokens"):
        next(validation_batches(np.zeros(5, np.uint16), 1, 10))


def test_bad_arguments():
    with pytest.raises(ValueError, match="batch_size and seq_len: got 0 and 4"):
        make((10, 4, 0, 0))
    with pytest.raises(ValueError, match=r"process_index: got 2, allowed is 0 to .* = 1"):
        make((10, 4, 1, 0), process_index=2, process_count=2)
    with pytest.raises(ValueError, match="step: got -1, allowed is 0 or more"):
        make((10, 4, 1, 0)).batch(-1)
