"""`smalti masks show`: a mask and its tiles, drawn and counted."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

MOST_TOKENS = 1 << 24  # more would take minutes to count
MOST_WIDTH = 160
SUFFIXES = (".png", ".svg")
_WIDTH = 80  # of what is not a terminal


def show(
    mask: Annotated[
        str,
        typer.Argument(
            metavar="MASK",
            help="full(), causal(), sliding_window(N), local(LEFT, RIGHT), streaming(sinks=, "
            "window=), prefix_lm(N), document(lengths=[N, …]), lengths(q=, kv=), joined by &, | "
            "and ~.",
        ),
    ],
    q_len: Annotated[int, typer.Option("--q-len", metavar="N", help="Queries.")],
    kv_len: Annotated[
        int | None, typer.Option("--kv-len", metavar="N", help="Keys; as many as queries if not.")
    ] = None,
    block_q: Annotated[
        int, typer.Option("--block-q", metavar="N", help="Queries of a tile.")
    ] = 128,
    block_kv: Annotated[int, typer.Option("--block-kv", metavar="N", help="Keys of a tile.")] = 128,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Draw it: .png or .svg.")
    ] = None,
) -> None:
    """Draw a mask and its tiles: which are whole, cut and empty, and the FLOPs that saves.

    \b
    smalti masks show 'streaming(sinks=4, window=512) & document(lengths=[3000, 1096])' --q-len 4096
    """
    from smalti import masks
    from smalti.cli import output

    kv_len = q_len if kv_len is None else kv_len
    sizes = {"--q-len": q_len, "--kv-len": kv_len, "--block-q": block_q, "--block-kv": block_kv}
    for option, size in sizes.items():
        if not 1 <= size <= MOST_TOKENS:
            raise ValueError(f"{option} {size}: from 1 to {MOST_TOKENS}")
    if out is not None:
        output.check_picture("--out", out, SUFFIXES)
    parsed = masks.parse(mask)
    block_mask = masks.build_block_mask(parsed, 1, 1, q_len, kv_len, block_q, block_kv)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    print(
        masks.show(
            block_mask,
            width=min(width, MOST_WIDTH),
            ascii=not _can_print("▒█·×ᵀ…"),
            title=repr(parsed),
        )
    )
    if out is not None:
        output.write_file(out, lambda: masks.draw(block_mask, out, title=repr(parsed)))


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
