"""Compiles and estimates every variant of every peer, a few at a time, and keeps the best."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from smalti.cli.ours import OURS, our_variant
from smalti.estimate import CompilerMissing, EstimateError, compile_for, estimate
from smalti.estimate.peers import AttentionCase, Variant, attention_variants
from smalti.estimate.report import entry
from smalti.estimate.workers import run_all

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
    for task, result in run_all(partial(_run_task, subject), tasks, jobs):
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


def _run_task(subject: Subject, task: tuple[str, int]) -> dict[str, Any]:
    return run_one(subject, *task)


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
    except CompilerMissing:
        raise
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
