"""What an estimate says, for people and for programs.

`entry` makes JSON values of an `Estimate`; all else reads those: `tables` (rich), `chart`
(matplotlib) and `compare`, so that a record from a file shows as it did when it was made.
"""

from smalti.estimate.report.diff import compare
from smalti.estimate.report.entry import entry
from smalti.estimate.report.lines import Line, source_lines
from smalti.estimate.report.record import (
    attention_record,
    entries_of,
    fn_record,
    read_record,
    record_text,
)

__all__ = [
    "Line",
    "attention_record",
    "compare",
    "entries_of",
    "entry",
    "fn_record",
    "read_record",
    "record_text",
    "source_lines",
]
