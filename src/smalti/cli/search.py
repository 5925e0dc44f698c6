"""Compiles and estimates every variant of every peer, a few at a time, and keeps the best."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from smalti.cli.failing import Failed
from smalti.cli.ours import OURS, our_variant
from smalti.estimate import EstimateError, compile_for, estimate
from smalti.estimate.peers import AttentionCase, Variant, attention_variants
from smalti.estimate.report import entry

MOST_JOBS = 2  # without being asked: a compiler takes a core and up to several GB


@dataclass(frozen=True)
class Subject:
    """What is asked of every peer."""

    case: AttentionCase
    which: str  # pass
    chip: str
    flags: tuple[str, ...]
    label: str


@dataclass
class Found:
    """A peer's best entry, or why there is none; and all that was tried."""

    best: dict[str, Any] | None = None
    reason: str | None = None
    tried: list[dict[str, Any]] | None = None


def default_jobs() -> int:
    return min(MOST_JOBS, os.cpu_count() or 1)


def variants_of(subject: Subject, name: str) -> list[Variant]:
    """Raises EstimateError where the peer is not installed."""
    if name == OURS:
        return [our_variant(subject.case, subject.which, subject.chip)]
    return attention_variants(name, subject.case, subject.which)


def search(
    subject: Subject,
    names: Sequence[str],
    *,
    most: int | None,
    jobs: int,
    on_start: Callable[[int], None],
    on_done: Callable[[str], None],
) -> dict[str, Found]:
    """By name, the best of its first `most` variants (None: of all).

    on_start is told how many variants there are, on_done the name of the peer that is one further.
    Whatever a variant raises is why it failed, and stops no other.
    """
    found: dict[str, Found] = {}
    tasks: list[tuple[str, int]] = []
    for name in names:
        found[name] = Found(tried=[])
        try:
            variants = variants_of(subject, name)[:most]
        except EstimateError as error:
            found[name].reason = str(error)
            continue
        tasks += [(name, index) for index in range(len(variants))]
    on_start(len(tasks))
    results: dict[tuple[str, int], dict[str, Any]] = {}
    for task, result in _run_all(subject, tasks, jobs):
        results[task] = result
        on_done(task[0])
    for name, index in tasks:  # in the order of promise, so that ties go to the first
        result = results[name, index]
        one = found[name]
        assert one.tried is not None
        made = result.pop("entry", None)
        one.tried.append(result)
        if made is not None and (one.best is None or made["cycles"] < one.best["cycles"]):
            one.best = made
    for one in found.values():
        if one.best is None and one.reason is None:
            reasons = list(dict.fromkeys(result["reason"] for result in one.tried or ()))
            more = f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""
            one.reason = (reasons[0] + more) if reasons else "it has no variant for this case"
    return found


def run_one(subject: Subject, name: str, index: int) -> dict[str, Any]:
    """One variant's `entry`, or the `reason` for having none."""
    variant = variants_of(subject, name)[index]
    result = {"variant": variant.name, "blocks": dict(variant.blocks), "source": variant.source}
    if variant.refused is not None:
        return {**result, "cycles": None, "reason": variant.refused}
    try:
        flags = (*variant.flags, *subject.flags)
        program = compile_for(variant.fn, *variant.args, chip=subject.chip, flags=flags)
        made = entry(estimate(program), label=subject.label, variant=variant.name)
    except Exception as error:  # a library's own errors are of any kind
        return {
            **result,
            "cycles": None,
            "reason": _reason(error),
            "compiler_message": getattr(error, "compiler_message", ""),
        }
    made["blocks"] = result["blocks"]
    return {**result, "cycles": made["cycles"], "entry": made}


def _reason(error: Exception) -> str:
    text = str(error).strip() or "it says nothing"
    clear = isinstance(error, (EstimateError, NotImplementedError))
    return text if clear else f"{type(error).__name__}: {text}"


def _run_all(
    subject: Subject, tasks: Sequence[tuple[str, int]], jobs: int
) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    if jobs == 1 or len(tasks) <= 1:
        for task in tasks:
            yield task, run_one(subject, *task)
        return
    with _workers(min(jobs, len(tasks))) as pool:
        waiting: dict[Future, tuple[str, int]] = {
            pool.submit(_work, subject, *task): task for task in tasks
        }
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                task = waiting.pop(future)
                try:
                    yield task, future.result()
                except BrokenProcessPool as error:
                    raise Failed(
                        "a worker died, mostly of a machine that ran out of memory; what was "
                        "compiled is kept: run the same command with --jobs 1"
                    ) from error


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes, because a simulation is plain Python; stopped at once if this one is."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_start_worker
    )
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _work(subject: Subject, name: str, index: int) -> dict[str, Any]:
    try:
        return run_one(subject, name, index)
    except SystemExit:
        os._exit(1)  # the pool would go on with the next task


def _start_worker() -> None:
    # Ctrl-C reaches every process of the terminal: the first one tells the others. SystemExit
    # leaves a compilation through its own cleaning up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
