"""A compiled module's text as operations with times.

`read_module` parses `Program.hlo`, `schedule` lists what it runs, `summarize` adds it up.
"""

from smalti.estimate.module.hlo import Module, read_module
from smalti.estimate.module.prices import Overlap
from smalti.estimate.module.schedule import ASSUMPTIONS, Op, Schedule, schedule
from smalti.estimate.module.summary import Summary, Unpriced, summarize

__all__ = [
    "ASSUMPTIONS",
    "Module",
    "Op",
    "Overlap",
    "Schedule",
    "Summary",
    "Unpriced",
    "read_module",
    "schedule",
    "summarize",
]
