import re

import pytest

from smalti.estimate.bundles.utilization import UNITS, parse_utilization
from smalti.estimate.errors import DumpUnreadable

from ..simulate.listings import CAPACITY, utilization

ROWS = [[1, 0, 4, 0, 1, 0, 0, 2, 2, 0], [0] * len(UNITS)]
TEXT = utilization(ROWS)


def test_slots():
    found = parse_utilization(TEXT, "k", 2)
    assert found.capacity.tolist() == list(CAPACITY)
    assert found.used.tolist() == ROWS


@pytest.mark.parametrize(
    ("change", "bundles", "expected"),
    [
        (lambda t: "", 2, "k: the utilisation file does not start as it did in libtpu 0.0.50"),
        (
            lambda t: t.replace("CAPACTIY", "CAPACITY"),
            2,
            "k: the utilisation file does not start as it did in libtpu 0.0.50",
        ),
        (
            lambda t: t.replace("== UTIL", "== util"),
            2,
            "k: the utilisation file does not start as it did in libtpu 0.0.50",
        ),
        (
            lambda t: t.replace("EUP", "EUP2"),
            2,
            f"k: the utilisation file has the units {(*UNITS[:4], 'EUP2', *UNITS[5:])}, known are "
            f"{UNITS}",
        ),
        (
            lambda t: t.replace("1 0 4", "1 x 4"),
            2,
            "k: the utilisation file holds what is no number",
        ),
        (
            lambda t: t.replace("1 0 4", "1 4"),
            2,
            "k: the utilisation file holds what is no number",
        ),
        (
            lambda t: t,
            3,
            "k: the utilisation file has 2 rows for 3 bundles; one of the two is cut short",
        ),
        (
            lambda t: t.replace("1 0 4", "3 0 4"),
            2,
            "k: a bundle takes more slots than there are; it is damaged",
        ),
        (
            lambda t: t.replace("1 0 4", "-1 0 4"),
            2,
            "k: a bundle takes more slots than there are; it is damaged",
        ),
    ],
)  # fmt: skip
def test_damage_is_named(change, bundles, expected):
    with pytest.raises(DumpUnreadable, match=f"^{re.escape(expected)}$"):
        parse_utilization(change(TEXT), "k", bundles)
