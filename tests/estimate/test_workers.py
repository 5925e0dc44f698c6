"""Processes: results, errors and deaths come back; nothing is begun that should not be."""

import os
import signal

import pytest

from smalti.estimate import EstimateError
from smalti.estimate.workers import run_all


def square(number: int) -> int:
    if number == 13:
        raise EstimateError("thirteen")
    if number == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_one_job_runs_here_and_in_order():
    assert list(run_all(lambda n: (n, os.getpid()), [3, 1], jobs=1)) == [
        (3, (3, os.getpid())),
        (1, (1, os.getpid())),
    ]


@pytest.mark.slow
def test_two_jobs_return_every_result_and_what_they_raise():
    assert sorted(run_all(square, [1, 2, 3], jobs=2)) == [(1, 1), (2, 4), (3, 9)]
    with pytest.raises(EstimateError, match="thirteen"):
        list(run_all(square, [13, 1], jobs=2))


def test_a_process_that_dies_is_said():
    with pytest.raises(EstimateError, match=r"a process of the search died.*--jobs 1"):
        list(run_all(square, [17, 1], jobs=2))


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_is_begun_after_no(jobs):
    answers = iter([True, True, *[False] * 100])
    results = list(run_all(square, [1, 2, 3, 4], jobs=jobs, go_on=lambda: next(answers)))
    assert sorted(results) == [(1, 1), (2, 4)]
