"""The search for the block sizes that cost least. It takes variants and knows no kernel.

found = search(variants, measure, journal, keys)
table = merged(block_table.load(path), entry_of(found, …))
"""

from smalti.estimate.tune.journal import Journal
from smalti.estimate.tune.measure import measure
from smalti.estimate.tune.search import Found, search
from smalti.estimate.tune.table import entry_of, merged
from smalti.estimate.tune.trial import Trial

__all__ = [
    "Found",
    "Journal",
    "Trial",
    "entry_of",
    "measure",
    "merged",
    "search",
]
