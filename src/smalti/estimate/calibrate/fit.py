"""Fits the few constants that no document gives, and says what each row's error is without it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from smalti.estimate.calibrate.predict import LATENCIES_NS, PUSH_SHARES, Constants, Subject
from smalti.estimate.calibrate.rows import Row

START = Constants(500.0, 0.25, 1e-4)
ROUNDS = 12


def fit(subjects: Sequence[Subject]) -> Constants:
    """Least sum of the median and the mean of the rows' errors, one constant after the other.

    A median cannot be pulled by one bad row; the mean keeps every row in the account. Each constant
    is set by the rows it moves: the dispatch by those timed from the host.
    """
    constants = START
    for _ in range(ROUNDS):
        before = constants
        for name, candidates in _candidates().items():
            moved = [s for s in subjects if _moves(s, name)]
            if moved:
                tried = [replace(constants, **{name: value}) for value in candidates]
                constants = min(tried, key=lambda c: _loss(moved, c))
        if constants == before:
            break
    return constants


def _candidates() -> dict[str, np.ndarray]:
    return {
        "dma_latency_ns": np.arange(LATENCIES_NS[0], LATENCIES_NS[-1] + 1, 10.0),
        "mxu_push_share": np.arange(PUSH_SHARES[0], PUSH_SHARES[-1] + 0.001, 0.02),
        "dispatch_s": np.arange(50e-6, 150e-6, 1e-6),
    }


def _moves(subject: Subject, name: str) -> bool:
    """Whether a constant changes the row's time by more than a thousandth over its range."""
    if name == "dispatch_s":
        return subject.row.includes_dispatch
    times = subject.by_latency if name == "dma_latency_ns" else subject.by_share
    return bool(np.ptp(times) > 1e-3 * times[1])


def relative_error(subject: Subject, constants: Constants) -> float:
    return subject.seconds(constants) / subject.row.seconds - 1


def _loss(subjects: Sequence[Subject], constants: Constants) -> float:
    errors = np.abs([relative_error(s, constants) for s in subjects])
    return float(np.median(errors) + np.mean(errors))


def leave_one_out(subjects: Sequence[Subject]) -> list[float]:
    """Each row's relative error with constants fitted on all the others."""
    return [
        relative_error(subject, fit([s for s in subjects if s is not subject]))
        for subject in subjects
    ]


def _what(row: Row) -> tuple[str, ...]:
    """Rows of which this is equal are variants of one thing."""
    return row.chip, row.shape, row.mask, row.which, row.file


def wrong_orders(subjects: Sequence[Subject], constants: Constants) -> list[tuple[str, str]]:
    """Pairs of published variants of one shape on one chip whose order is predicted wrongly."""
    wrong = []
    for a, b in itertools.combinations(subjects, 2):
        if _what(a.row) != _what(b.row):
            continue
        published = a.row.seconds < b.row.seconds
        if published != (a.seconds(constants) < b.seconds(constants)):
            wrong.append((a.row.id, b.row.id))
    return wrong
