"""Cut and damaged dumps: an error of ours, and never other cycles without a bundle."""

import contextlib
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti.estimate.bundles.listing import parse_listing
from smalti.estimate.errors import DumpUnreadable, EstimateError
from smalti.estimate.simulate import kernel as kernel_module

from ..fixtures import load

NAME = "table_v6e"
BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: *>* *\{", re.MULTILINE)


@pytest.fixture(scope="module")
def whole():
    return load(NAME).simulate()


def cycles(bundles=None, utilization=None) -> float:
    """Raises what the simulation raises; a ValueError may only say that operands do not fit."""
    fixture = load(NAME)
    dump = fixture.dump
    if bundles is not None:
        dump = replace(dump, bundles=bundles)
    if utilization is not None:
        dump = replace(dump, utilization=utilization)
    try:
        return replace(fixture, dump=dump).simulate().cycles
    except ValueError as error:
        if not re.match(r"operands\[\d+\] of \S+ is ", str(error)):
            raise
        raise DumpUnreadable(str(error)) from error


def test_cut_at_every_bundle():
    text = load(NAME).dump.bundles
    places = [match.start() for match in BUNDLE.finditer(text)]
    assert len(places) == len(parse_listing(text, NAME).bundles)
    for place in places:
        with pytest.raises(DumpUnreadable):
            cycles(text[:place])


def test_cut_anywhere(whole):
    text = load(NAME).dump.bundles
    marker = text.rindex("/* exit bundle")
    for place in (*range(0, len(text), 97), *range(marker - 50, len(text))):
        try:
            found = cycles(text[:place])
        except DumpUnreadable:
            continue
        assert text[place:].strip() == ""
        assert found == whole.cycles


def test_without_its_beginning():
    text = load(NAME).dump.bundles
    places = [match.start() for match in BUNDLE.finditer(text)]
    for place in places[1:]:
        with pytest.raises(DumpUnreadable):
            cycles(text[place:])


def test_without_one_line(whole):
    lines = load(NAME).dump.bundles.splitlines(keepends=True)
    for number, line in enumerate(lines):
        left = "".join(lines[:number] + lines[number + 1 :])
        if BUNDLE.match(line):
            with pytest.raises(DumpUnreadable):
                cycles(left)
        else:  # a line of a comment
            with contextlib.suppress(DumpUnreadable):
                assert cycles(left) == whole.cycles


def test_with_two_lines_swapped(whole):
    lines = load(NAME).dump.bundles.splitlines(keepends=True)
    for number in range(len(lines) - 1):
        swapped = [*lines[:number], lines[number + 1], lines[number], *lines[number + 2 :]]
        if BUNDLE.match(lines[number]) and BUNDLE.match(lines[number + 1]):
            with pytest.raises(DumpUnreadable):
                cycles("".join(swapped))
        else:
            with contextlib.suppress(EstimateError):
                assert cycles("".join(swapped)) == whole.cycles


def test_with_a_bundle_twice():
    lines = load(NAME).dump.bundles.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if BUNDLE.match(line):
            with pytest.raises(DumpUnreadable):
                cycles("".join(lines[: number + 1] + lines[number:]))


def test_a_utilization_without_a_row_or_with_one_too_many():
    lines = load(NAME).dump.utilization.splitlines(keepends=True)
    for number in range(len(lines)):
        with pytest.raises(DumpUnreadable):
            cycles(utilization="".join(lines[:number] + lines[number + 1 :]))
        if number >= 4:
            with pytest.raises(DumpUnreadable):
                cycles(utilization="".join(lines[: number + 1] + lines[number:]))


def test_a_utilization_cut_anywhere():
    text = load(NAME).dump.utilization
    for place in range(0, len(text.rstrip()) - 2, 7):
        with pytest.raises(DumpUnreadable):
            cycles(utilization=text[:place])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_characters_changed(data):
    with pytest.MonkeyPatch.context() as patch:
        # A counter that is damaged may turn for long.
        patch.setattr(kernel_module, "BLOCKS_WITHOUT_COPY", 20_000)
        patch.setattr(kernel_module, "BLOCKS", 100_000)
        fixture = load(NAME)
        where = data.draw(st.sampled_from(["bundles", "utilization"]))
        text = getattr(fixture.dump, where)
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, len(text) - 1))
            kind = data.draw(st.sampled_from(["change", "drop", "insert"]))
            new = data.draw(st.sampled_from('0123456789abcfpsvx%$#[](){}:;,.*/+-!" \n'))
            if kind == "change":
                text = text[:place] + new + text[place + 1 :]
            elif kind == "drop":
                text = text[:place] + text[place + 1 :]
            else:
                text = text[:place] + new + text[place:]
        try:
            found = cycles(**{where: text})
        except EstimateError:
            return
        assert found > 0
        if where == "bundles":
            count = len(parse_listing(text, NAME).bundles)
            assert count == len(parse_listing(fixture.dump.bundles, NAME).bundles)
