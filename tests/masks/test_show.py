"""Drawings in text and as pictures."""

import re
from pathlib import Path

import numpy as np
import pytest

from smalti import masks
from smalti.masks import build_block_mask, draw, show
from smalti.masks.parse import NAMES
from smalti.masks.show import cells

from . import brute

DOCS = Path(__file__).resolve().parents[2] / "docs"
CAUSAL = build_block_mask(masks.causal(), 1, 1, 12, 4, 4)


def test_each_tile_is_two_characters():
    assert show(CAUSAL).splitlines() == [
        "causal(offset=0)",
        "12 queries (down) × 12 keys (across), tiles of 4 × 4",
        "",
        "▒▒····",
        "██▒▒··",
        "████▒▒",
        "",
        "█ whole: every pair visible   ▒ cut: some are   · empty: none is, never touched",
        "",
        "tiles              9",
        "  live             6  66.67 %",
        "    whole          3  33.33 %",
        "    cut            3  33.33 %",
        "  empty            3  33.33 %",
        "pairs            144",
        "  in live tiles   96  66.67 %",
        "  visible         78  54.17 %",
        "",
        "FLOPs saved, of dense QKᵀ and PV:",
        "   33.33 %  empty tiles left out",
        "   45.83 %  if each hidden pair were",
        "   33.33 %  empty tiles of causal() left out, to compare",
    ]


def test_ascii_is_ascii():
    text = show(CAUSAL, ascii=True, title="mine")
    assert text.isascii()
    assert text.startswith("mine\n")
    assert "\n++....\n##++..\n####++\n" in text


def test_a_long_title_is_cut():
    block_mask = build_block_mask(masks.document(lengths=[1] * 500), 1, 1, 500, 128, 128)
    assert len(show(block_mask).splitlines()[0]) == 200


@pytest.mark.parametrize("most", [(3, 2), (5, 4), (1, 1), (100, 100)])
@pytest.mark.parametrize("name", ["streaming(2, 3)", "document", "mask_mod", "full"])
def test_a_cell_is_of_one_kind_if_all_its_tiles_are(name, most):
    grid = brute.TileGrid(2, 3, 41, 37, 2, 3)
    case = (brute.catalogue_cases(grid) | brute.general_cases(grid))[name]
    block_mask = build_block_mask(case.mask, *brute.shape(grid), grid.block_q, grid.block_kv)
    some, every = (x[1, 1] for x in brute.states_of(case.mask, grid))
    tiles = some.astype(int) + (some & every)
    found, (per_q, per_kv) = cells(block_mask, *most, batch=1, head=1)
    assert found.shape <= most
    for i, row in enumerate(found):
        for j, kind in enumerate(row):
            inside = tiles[i * per_q : (i + 1) * per_q, j * per_kv : (j + 1) * per_kv]
            assert kind == (inside.flat[0] if len(np.unique(inside)) == 1 else 1)


def test_a_million_tokens_fit_a_line():
    block_mask = build_block_mask(masks.streaming(sinks=4, window=9), 1, 1, 1 << 20, 128, 128)
    drawing, (per_q, per_kv) = cells(block_mask, 40, 40)
    assert (per_q, per_kv) == (205, 205)
    expected = np.eye(40, dtype=int) + np.eye(40, k=-1, dtype=int)
    expected[:, 0] = 1
    np.testing.assert_array_equal(drawing, expected)


@pytest.mark.parametrize("q_len", [12, 5000])
@pytest.mark.parametrize("suffix", [".png", ".SVG"])
def test_pictures_are_the_same_each_time(tmp_path, suffix, q_len):
    block_mask = build_block_mask(masks.sliding_window(q_len // 3), 1, 1, q_len, 20, q_len // 4, 4)
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        draw(block_mask, path)
    data = first.read_bytes()
    assert data == second.read_bytes()
    assert len(data) < 60_000
    assert data.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in data


def test_a_picture_of_another_format(tmp_path):
    with pytest.raises(ValueError, match=r"path: got 'a\.pdf'; the name must end in \.png or \.sv"):
        draw(CAUSAL, "a.pdf")


def test_each_mask_of_the_catalogue_is_drawn_in_the_docs():
    """By `scripts/draw_masks`, which draws what the pictures' alternative texts say."""
    page = (DOCS / "masks.md").read_text(encoding="utf-8")
    pictures = {name: text for text, name in re.findall(r"!\[`(.+?)`\]\(masks/(\w+)\.png\)", page)}
    combined = pictures.pop("combined")
    assert {text.partition("(")[0]: name for name, text in pictures.items()} == {
        name: name for name in NAMES
    }
    assert re.search("[&|~]", combined)
    for text in (combined, *pictures.values()):
        masks.parse(text).bind(1, 1, 64, 64)
    files = {file.stem: file.read_bytes() for file in (DOCS / "masks").iterdir()}
    assert set(files) == {*NAMES, "combined"}
    assert all(data.startswith(b"\x89PNG") and len(data) < 15_000 for data in files.values())


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_replaces_an_old_one_whole_or_not_at_all(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        draw(CAUSAL, path)
    assert path.read_text() == "old"
    monkeypatch.undo()
    draw(CAUSAL, path)
    assert path.read_bytes() != b"old"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
