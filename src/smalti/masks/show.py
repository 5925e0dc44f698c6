"""Draw a mask and its tiles: as text, and as a picture (which needs matplotlib)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from smalti.files import save_figure
from smalti.masks.block_mask import BlockMask
from smalti.masks.catalogue import causal
from smalti.masks.count import count, entry, pairs_of
from smalti.masks.mask_mod import CUT, EMPTY, WHOLE
from smalti.masks.runs import find_runs, live_runs
from smalti.masks.tiles import TileGrid

MOST_ROWS = 40  # of a drawing in text; a screen's height
MOST_CELLS = 256  # a side, of a picture
MOST_PAIRS = 1024  # queries or keys that a picture shows one by one
SUFFIXES = (".png", ".svg")
# What each kind is drawn as: empty, hidden in a cut tile, visible in a cut tile (or the tile as a
# whole, where pairs are too small to see), whole.
COLORS = ("#f2f1ec", "#f5dcb8", "#d98324", "#1f6f78")


def show(
    block_mask: BlockMask,
    *,
    batch: int = 0,
    head: int = 0,
    width: int = 80,
    ascii: bool = False,
    title: str | None = None,
) -> str:
    """The tiles of one batch entry and head as a drawing in text, and their counts.

    Long sequences are drawn with several tiles in one place. ``width``: characters of a line.
    ``ascii``: nothing that a terminal of any age cannot show. ``title``: what to call the mask.

    >>> from smalti.masks import build_block_mask, causal
    >>> print(show(build_block_mask(causal(), 1, 1, 512, 128, 128)).splitlines()[3])
    ▒▒······
    """
    entry(block_mask, batch, head)
    grid = block_mask.grid
    marks, times, transposed = (".+#", "x", "K'") if ascii else ("·▒█", "×", "Kᵀ")
    most = max(width // 2, 1)
    state, (per_q, per_kv) = cells(block_mask, MOST_ROWS, most, batch, head)
    counts = count(block_mask, batch, head)
    lines = [
        _words(block_mask, title),
        f"{grid.q_len:,} queries (down) {times} {grid.kv_len:,} keys (across), "
        f"tiles of {grid.block_q} {times} {grid.block_kv}",
        "",
        # A character is about twice as high as it is wide.
        *("".join(2 * marks[kind] for kind in row) for row in state),
        "",
        f"{marks[WHOLE]} whole: every pair visible   {marks[CUT]} cut: some are   "
        f"{marks[EMPTY]} empty: none is, never touched",
    ]
    if per_q * per_kv > 1:
        lines.append(
            f"each place is {per_q} {times} {per_kv} tiles; those that differ are drawn as "
            f"{marks[CUT]}"
        )
    dense = grid.num_q * grid.num_kv
    rows = [
        ("tiles", f"{dense:,}", ""),
        ("  live", f"{counts.live:,}", _percent(counts.live / dense)),
        ("    whole", f"{counts.whole:,}", _percent(counts.whole / dense)),
        ("    cut", f"{counts.cut:,}", _percent(counts.cut / dense)),
        ("  empty", f"{counts.empty:,}", _percent(counts.empty / dense)),
        ("pairs", f"{counts.pairs:,}", ""),
        ("  in live tiles", f"{counts.pairs_live:,}", _percent(1 - counts.saved)),
        ("  visible", f"{counts.pairs_visible:,}", _percent(1 - counts.saved_by_pair)),
    ]
    widest = max(len(number) for _, number, _ in rows)
    lines += [
        "",
        *(f"{name:17}{number:>{widest}}  {share:>7}".rstrip() for name, number, share in rows),
        "",
        f"FLOPs saved, of dense Q{transposed} and PV:",
        f"  {_percent(counts.saved):>8}  empty tiles left out",
        f"  {_percent(counts.saved_by_pair):>8}  if each hidden pair were",
        f"  {_percent(_saved_by_causal(grid)):>8}  empty tiles of causal() left out, to compare",
    ]
    return "\n".join(lines)


def draw(
    block_mask: BlockMask,
    path: str | Path,
    *,
    batch: int = 0,
    head: int = 0,
    title: str | None = None,
) -> None:
    """Write a picture of the tiles of one batch entry and head, .png or .svg.

    Up to 1,024 queries and keys, single pairs are shown inside of cut tiles. The same mask gives
    the same file, which replaces an old one whole. Needs matplotlib
    (``pip install "smalti[cli]"``).
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"path: got {str(path)!r}; the name must end in {' or '.join(SUFFIXES)}.")
    entry(block_mask, batch, head)
    # The figure alone, without pyplot's windows and global state.
    import matplotlib
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    grid = block_mask.grid
    by_pair = max(grid.q_len, grid.kv_len) <= MOST_PAIRS
    if by_pair:
        kinds = _pairs(block_mask, batch, head)
    else:
        state, _ = cells(block_mask, MOST_CELLS, MOST_CELLS, batch, head)
        kinds = np.array([0, 2, 3])[state]
    wide = min(max(grid.kv_len / grid.q_len, 0.4), 2.5)
    figure = Figure(figsize=(max(2.4 * wide, 2.4) + 0.9, 3.3), dpi=100, layout="constrained")
    axes: Any = figure.add_subplot()
    axes.imshow(
        kinds,
        cmap=ListedColormap(COLORS),
        vmin=-0.5,
        vmax=3.5,
        extent=(0, grid.kv_len, grid.q_len, 0),
        interpolation="nearest",
        aspect="auto",
    )
    if max(grid.num_q, grid.num_kv) <= 64:
        axes.hlines(np.arange(1, grid.num_q) * grid.block_q, 0, grid.kv_len, "white", lw=0.6)
        axes.vlines(np.arange(1, grid.num_kv) * grid.block_kv, 0, grid.q_len, "white", lw=0.6)
    axes.set_title(_words(block_mask, title), fontsize=7, family="monospace", wrap=True)
    axes.set_xlabel("keys", fontsize=7)
    axes.set_ylabel("queries", fontsize=7)
    axes.tick_params(labelsize=6, length=2)
    axes.locator_params(nbins=5, integer=True)
    names = ("empty", "hidden in cut", "visible in cut", "whole") if by_pair else ("empty",)
    names = names if by_pair else (*names, None, "cut", "whole")
    patches = [
        Patch(facecolor=color, edgecolor="#999999", linewidth=0.4, label=name)
        for color, name in zip(COLORS, names, strict=True)
        if name is not None
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=6, frameon=False)
    # Neither a date nor a version in the file.
    metadata: dict[str, Any] = {"Date": None, "Creator": None} if _is_svg(path) else {}
    metadata = metadata or {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "smalti"}):
        save_figure(figure, path, metadata=metadata)


def cells(
    block_mask: BlockMask, most_rows: int, most_columns: int, batch: int = 0, head: int = 0
) -> tuple[np.ndarray, tuple[int, int]]:
    """EMPTY, CUT or WHOLE of each cell, ``[rows, columns]``, and how many tiles a cell spans.

    A cell is one tile where so many fit, else a rectangle of them, CUT if they differ. Counted from
    runs, a row of cells at a time.
    """
    batch, head = entry(block_mask, batch, head)
    grid = block_mask.grid
    per_q, per_kv = -(-grid.num_q // most_rows), -(-grid.num_kv // most_columns)
    row, start, stop, whole = live_runs(block_mask.q_runs, batch, head)
    bounds = np.searchsorted(row, np.arange(0, grid.num_q + per_q, per_q))
    columns = np.arange(0, grid.num_kv, per_kv)
    widths = np.diff(np.append(columns, grid.num_kv))
    state = []
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        tiles = widths * (min((i + 1) * per_q, grid.num_q) - i * per_q)
        found = []
        for some in (np.ones_like(whole), whole):
            chosen = some[begin:end]
            # +1 where a run begins, −1 past its end: summed up, how many runs a column is in.
            steps = np.bincount(start[begin:end][chosen], minlength=grid.num_kv + 1)
            steps = steps - np.bincount(stop[begin:end][chosen], minlength=grid.num_kv + 1)
            found.append(np.add.reduceat(np.cumsum(steps)[:-1], columns))
        live, all_whole = found[0] > 0, found[1] == tiles
        state.append(np.where(all_whole, WHOLE, np.where(live, CUT, EMPTY)))
    return np.array(state), (per_q, per_kv)


def _pairs(block_mask: BlockMask, batch: int, head: int) -> np.ndarray:
    """Which of `COLORS` each pair is drawn in, ``[Sq, Sk]``."""
    grid = block_mask.grid
    state, _ = cells(block_mask, grid.num_q, grid.num_kv, batch, head)
    state = state.repeat(grid.block_q, 0)[: grid.q_len].repeat(grid.block_kv, 1)[:, : grid.kv_len]
    q_idx, kv_idx = np.arange(grid.q_len, dtype=np.int32), np.arange(grid.kv_len, dtype=np.int32)
    visible = np.asarray(block_mask.mask(batch, head, q_idx[:, None], kv_idx[None, :]))
    return np.where(state == CUT, np.where(visible, 2, 1), np.where(state == WHOLE, 3, 0))


def _saved_by_causal(grid: TileGrid) -> float:
    mask = causal().bind(grid.batch, grid.heads, grid.q_len, grid.kv_len)
    return 1 - pairs_of(find_runs(mask, grid), grid) / (grid.q_len * grid.kv_len)


def _words(block_mask: BlockMask, title: str | None) -> str:
    text = repr(block_mask.mask) if title is None else title
    return text if len(text) <= 200 else text[:199] + "…"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _is_svg(path: Path) -> bool:
    return path.suffix.lower() == ".svg"
