"""A function over tasks, a few at a time, each in a process of its own: it is plain Python."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from smalti.estimate.errors import EstimateError

_SECONDS_TO_CLEAN_UP = 2.0

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_all(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    jobs: int,
    go_on: Callable[[], bool] = lambda: True,
) -> Generator[tuple[Task, Result], None, None]:
    """Each task with its result, as they are done; begun in the order given.

    function: where jobs > 1, it, the tasks and the results are pickled; what it raises is raised
        here. go_on: asked before a task is begun; when it says no, those that run are waited for.
    Leaving by an exception, Ctrl-C as well, ends the processes. EstimateError: one of them died.
    """
    if jobs == 1 or len(tasks) <= 1:
        for task in tasks:
            if not go_on():
                return
            yield task, function(task)
        return
    left = list(reversed(tasks))
    running: dict[Future[Result], Task] = {}
    with _processes(min(jobs, len(tasks))) as pool:
        while True:
            while left and len(running) < jobs and go_on():
                task = left.pop()
                running[pool.submit(function, task)] = task
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task = running.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool as error:
                    raise EstimateError(
                        "a process of the search died, mostly of a machine that ran out of "
                        "memory; what was found is kept: run the same with --jobs 1"
                    ) from error
                yield task, result


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_start)
    try:
        yield pool
    except BaseException:  # GeneratorExit is one: the caller stopped
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches every process of the terminal: the first one tells the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)


def _end(*_) -> None:
    """SystemExit leaves a compilation through its own cleaning up. The executor takes it for the
    task's result and would wait for another, which never comes if its parent is ending too."""
    timer = threading.Timer(_SECONDS_TO_CLEAN_UP, os._exit, (1,))
    timer.daemon = True
    timer.start()
    sys.exit(1)


def _end_with_parent() -> None:
    """However it ends: a worker that nobody waits for would hold its memory and the terminal."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
