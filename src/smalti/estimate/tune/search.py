"""The search: every candidate of a grid once, the most promising first, within a budget.

Nothing is left out for a bound that it cannot beat: the one bound that is known before compiling,
the MXU's, is the same for all blocks of one shape.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smalti.estimate.peers import Variant
from smalti.estimate.tune.journal import Journal
from smalti.estimate.tune.trial import Trial
from smalti.estimate.workers import run_all


@dataclass
class Found:
    """`trials` by the candidate's place in `variants`; those not tried are not there."""

    variants: Sequence[Variant]
    trials: dict[int, Trial] = field(default_factory=dict)
    remembered: int = 0  # trials that were in the journal
    interrupted: bool = False  # by Ctrl-C

    @property
    def ranked(self) -> list[tuple[Variant, Trial]]:
        """Those with an estimate, the least cycles first; of equal ones the most promising."""
        hits = [(t.cycles, i) for i, t in self.trials.items() if t.cycles is not None]
        return [(self.variants[i], self.trials[i]) for _, i in sorted(hits)]

    @property
    def missed(self) -> list[tuple[Variant, Trial]]:
        """Those without one, in the grid's order."""
        return [(self.variants[i], t) for i, t in sorted(self.trials.items()) if t.reason]


def search(
    variants: Sequence[Variant],
    measure: Callable[[int], Trial],
    journal: Journal,
    keys: Sequence[Mapping[str, Any]],
    *,
    order: Sequence[int] | None = None,
    first: int | None = None,
    seconds: float | None = None,
    jobs: int = 1,
    on_start: Callable[[int], None] = lambda total: None,
    on_trial: Callable[[Variant], None] = lambda variant: None,
) -> Found:
    """Tries the candidates that the journal does not know, and adds them to it as they are done.

    measure: by a candidate's place in `variants`; picklable where jobs > 1.
    keys: of each candidate, all that its trial depends on.
    order: all places of `variants`, the most promising first; None for the order they have.
    first: only so many from the start of the order are tried; what the journal knows of others
        counts as well.
    seconds: after which no further candidate is begun.
    on_start: is told how many there are to do, with the journal's; on_trial, each as it is done.

    Ctrl-C ends it early, with what is known by then. What `measure` raises passes through, and the
    journal keeps what came before.
    """
    end = None if seconds is None else time.monotonic() + seconds
    found = Found(variants)
    for place, key in enumerate(keys):
        known = journal.find(key)
        if known is not None:
            found.trials[place] = known
    found.remembered = len(found.trials)
    places = range(len(variants)) if order is None else order
    left = [place for place in places[:first] if place not in found.trials]
    on_start(found.remembered + len(left))
    for place in found.trials:
        on_trial(variants[place])
    running = run_all(measure, left, jobs, lambda: end is None or time.monotonic() < end)
    try:
        for place, trial in running:
            found.trials[place] = trial
            if trial.lasting:
                journal.add(keys[place], trial)
            on_trial(variants[place])
    except KeyboardInterrupt:
        found.interrupted = True
    finally:
        running.close()
    return found
