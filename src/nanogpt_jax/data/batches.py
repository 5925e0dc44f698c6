"""Which tokens a training step sees: a pure function of (seed, step), with nothing to save.

An epoch cuts the N training tokens into windows of `seq_len` targets, side by side: window w has
inputs `tokens[a : a + seq_len]` and targets one further, `a = shift + w · seq_len`. So each token
is a target once an epoch, except the first and the `(N - 1) mod seq_len` that fill no window;
`shift` moves every epoch, so that those are other tokens each time. The windows of all epochs form
one endless line, each epoch in its own pseudo-random order, and step s takes the `batch_size` next
of it. Nothing depends on the number of processes, devices or accumulation steps: process p of P
takes rows `p·batch_size//P` to `(p+1)·batch_size//P` of the step's rows, and accumulation is a
reshape of them.

The order is a keyed permutation computed at the index (a Feistel network, cycle-walking down to
the number of windows: Black & Rogaway 2002), in integer arithmetic of our own: NumPy does not
promise that its shuffles stay the same between versions, and a resumed run must.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanogpt_jax.data.shards import Shards

Tokens = np.ndarray | Shards
Documents = Sequence[tuple[str, int]]
"""Name and first token of each document, in order; the first starts at 0."""

_ROUNDS = 6


class Position(NamedTuple):
    """Where one row of a batch comes from."""

    epoch: int
    window: int
    token: int  # the row's first input, counted from the start of the training tokens
    document: str
    offset: int  # the same, counted from the start of that document

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}, window {self.window}, token {self.token} "
            f"({self.document} + {self.offset})"
        )


@dataclass(frozen=True)
class Batches:
    """The training batches of one process.

    batch_size: rows of one step over all processes and accumulation steps.
    seed: orders the windows.
    documents: for `positions` only.
    Raises ValueError when the tokens do not fill one window.
    """

    tokens: Tokens
    batch_size: int
    seq_len: int
    seed: int = 0
    process_index: int = 0
    process_count: int = 1
    documents: Documents = (("the training tokens", 0),)

    def __post_init__(self):
        _check_size("training", self.tokens, self.batch_size, self.seq_len)
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(
                f"process_index: got {self.process_index}, allowed is 0 to process_count - 1 = "
                f"{self.process_count - 1}; pass jax.process_index() and jax.process_count()"
            )

    @property
    def windows(self) -> int:
        """Rows of one epoch."""
        return (len(self.tokens) - 1) // self.seq_len

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of this process at `step` ≥ 0: int32 `[its rows, seq_len]` each."""
        _, _, starts = self._rows(step)
        return _cut(self.tokens, starts, self.seq_len)

    def positions(self, step: int) -> list[Position]:
        """Where each row of `batch(step)` comes from."""
        firsts = [first for _, first in self.documents]
        found = []
        for epoch, window, token in zip(*self._rows(step), strict=True):
            name, first = self.documents[bisect_right(firsts, token) - 1]
            found.append(Position(int(epoch), int(window), int(token), name, int(token) - first))
        return found

    def _rows(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Epoch, window and first token of this process's rows, int64 each."""
        if step < 0:
            raise ValueError(f"step: got {step}, allowed is 0 or more; steps count from 0")
        rows = _rows_of_process(self.batch_size, self.process_index, self.process_count)
        epoch, place = np.divmod(step * self.batch_size + rows, self.windows)
        window, shift = np.empty_like(place), np.empty_like(place)
        left_over = (len(self.tokens) - 1) % self.seq_len
        for e in np.unique(epoch):
            now = epoch == e
            window[now] = permute(place[now], self.windows, self.seed, int(e))
            shift[now] = _mix(np.uint64(0), self.seed, int(e), _ROUNDS).item() % (left_over + 1)
        return epoch, window, shift + window * self.seq_len


def validation_batches(
    tokens: Tokens,
    batch_size: int,
    seq_len: int,
    windows: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The validation set in order: all its windows, or the first `windows`.

    Yields inputs and targets, int32 `[rows, seq_len]`, and weights, float32 `[rows]`: every batch
    has the same shape, and the rows that fill up the last one have weight 0. The loss of the set
    is `sum(weights · row means) / sum(weights)` over all batches. At most seq_len - 1 tokens at
    the end fill no window and are left out.
    """
    _check_size("validation", tokens, batch_size, seq_len)
    available = (len(tokens) - 1) // seq_len
    if windows is None:
        windows = available
    if not 1 <= windows <= available:
        raise ValueError(
            f"windows: got {windows}, allowed is 1 to {available}, the number in the validation "
            f"set at seq_len {seq_len}; leave it out to take all"
        )
    rows = _rows_of_process(batch_size, process_index, process_count)
    for first in range(0, windows, batch_size):
        window = first + rows
        weights = (window < windows).astype(np.float32)
        yield *_cut(tokens, np.where(window < windows, window, 0) * seq_len, seq_len), weights


def permute(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The images of `index`, int64 `[n]` in 0..size-1, under the permutation of (seed, epoch)."""
    half = np.uint64(max(2, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    value = index.astype(np.uint64)
    outside = np.ones(value.shape, bool)
    # The network permutes 0..4**half-1; whoever lands outside 0..size-1 walks on until inside.
    while outside.any():
        left, right = value[outside] >> half, value[outside] & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(right, seed, epoch, turn) & mask)
        value[outside] = (left << half) | right
        outside = value >= size
    return value.astype(np.int64)


def _mix(value: np.ndarray | np.uint64, seed: int, epoch: int, turn: int) -> np.ndarray:
    """A 64-bit hash of all its arguments: splitmix64 after each (Steele et al. 2014)."""
    state = np.atleast_1d(np.asarray(value, np.uint64))
    for word in (seed, epoch, turn):
        state = (state ^ np.uint64(word % 2**64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def _rows_of_process(batch_size: int, index: int, count: int) -> np.ndarray:
    return np.arange(index * batch_size // count, (index + 1) * batch_size // count)


def _cut(tokens: Tokens, starts: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.empty((len(starts), seq_len + 1), np.int32)
    for row, start in zip(rows, starts.tolist(), strict=True):
        row[:] = tokens[start : start + seq_len + 1]
    return rows[:, :-1], rows[:, 1:]


def _check_size(which: str, tokens: Tokens, batch_size: int, seq_len: int) -> None:
    if batch_size < 1 or seq_len < 1:
        raise ValueError(
            f"batch_size and seq_len: got {batch_size} and {seq_len}, allowed is 1 or more"
        )
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"seq_len: got {seq_len}, but the {which} set has {len(tokens)} tokens, and one window "
            f"takes {seq_len + 1}; use a shorter seq_len, more text or another val_fraction"
        )
