"""Tables of block sizes: how kernels read what `smalti estimate tune` found. See `find`.

A table is a JSON file: {"schema": 1, "entries": […]}. An entry serves a class of shapes:

- kernel, chip: names, such as "splash" and "v6e".
- same: what must be equal for the entry to serve: pass, dtype, mask, head_dim and value_dim.
- near: sizes, as powers of two, of which the nearest entry serves: group, Sq, Sk and window.
- blocks: what was found, by the kernel's own names; flags: of libtpu, that it was compiled with.
- cycles, time_ns: of the shape that was searched, an estimate; label: how far to trust it.
- runner_up: the second's blocks and cycles, or null; candidates: how many the grid has; tried: of
  how many the result is known; missed: how many of these gave no estimate.
- searched: the shape itself; versions, date and command: where the entry comes from.

Batch, the number of heads and the layout of arrays are in no class: they change how often a kernel
runs its blocks, and what is done around it, not what a block costs.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
Entry = dict[str, Any]
_TYPES = {
    **dict.fromkeys(("kernel", "chip", "label", "date", "command"), str),
    **dict.fromkeys(("same", "near", "blocks", "searched", "versions"), dict),
    **dict.fromkeys(("cycles", "time_ns", "candidates", "tried", "missed"), int),
    "flags": list,
    "runner_up": (dict, type(None)),
}


@dataclass(frozen=True)
class ShapeClass:
    """The shapes that one entry serves. `near` holds powers of two."""

    same: Mapping[str, str | int]
    near: Mapping[str, int]


def attention_class(
    *,
    which: str,
    dtype: str,
    mask: str,
    Hq: int,
    Hkv: int,
    Sq: int,
    Sk: int,
    D: int,
    Dv: int | None = None,
) -> ShapeClass:
    """The class of one attention.

    which: "forward", "backward" or "both". mask: "causal", "full", "sliding_window(1024)". D and Dv
    count up to 64, 128, 192, 256 and so on, since the rest of their lanes is padding; sequences,
    window and query heads per key head up to a power of two.

    >>> attention_class(which="forward", dtype="bfloat16", mask="causal", Hq=8, Hkv=2, Sq=3000,
    ...     Sk=3000, D=80).near
    {'group': 4, 'Sq': 4096, 'Sk': 4096}
    """
    kind, _, numbers = mask.partition("(")
    near = {"group": _bucket(Hq // Hkv), "Sq": _bucket(Sq), "Sk": _bucket(Sk)}
    if kind == "sliding_window":
        match = re.fullmatch(r"(\d+)\)", numbers)
        if match is None:
            raise ValueError(f"mask {mask!r} is not sliding_window(n)")
        near["window"], mask = _bucket(int(match[1])), kind
    return ShapeClass(
        same={
            "pass": which,
            "dtype": dtype,
            "mask": mask,
            "head_dim": _half_lanes(D),
            "value_dim": _half_lanes(D if Dv is None else Dv),
        },
        near=near,
    )


def matmul_class(*, dtype: str, M: int, K: int, N: int) -> ShapeClass:
    """The class of a product [M, K] × [K, N]."""
    return ShapeClass({"dtype": dtype}, {"M": _bucket(M), "K": _bucket(K), "N": _bucket(N)})


def find(
    entries: Iterable[Entry], *, kernel: str, chip: str, shape_class: ShapeClass
) -> Entry | None:
    """The entry that serves this class best, or None.

    Kernel, chip and all of `same` are equal. Of those, the entry whose sizes in `near` are fewest
    doublings away, all counted together; of two equally near, the one of smaller sizes. So blocks
    may be larger than a sequence: the kernel clips them.
    """
    best: tuple[float, list[int], Entry] | None = None
    for entry in entries:
        if (entry["kernel"], entry["chip"]) != (kernel, chip) or entry["same"] != shape_class.same:
            continue
        sizes = entry["near"]
        if sizes.keys() != shape_class.near.keys():
            continue
        away = sum(abs(math.log2(sizes[key] / size)) for key, size in shape_class.near.items())
        rank = away, [sizes[key] for key in shape_class.near]
        if best is None or rank < best[:2]:
            best = *rank, entry
    return None if best is None else best[2]


def load(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries of a table.

    Raises FileNotFoundError where there is none, and ValueError for a file that is no table, is
    damaged, or is of a newer smalti.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one, too
        raise _damaged(path, f"it is not JSON: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("schema"), int):
        raise _damaged(path, "it has no schema number")
    if value["schema"] != SCHEMA:
        raise ValueError(
            f"{path} is a block table of schema {value['schema']}, and this smalti reads {SCHEMA}: "
            "tune again, or use the smalti that wrote it"
        )
    entries = value.get("entries")
    if not isinstance(entries, list):
        raise _damaged(path, "it has no list of entries")
    for number, entry in enumerate(entries):
        if wrong := _wrong(entry):
            raise _damaged(path, f"entry {number} {wrong}")
    return entries


def dump(entries: Sequence[Entry]) -> str:
    """The text of a table; equal entries make equal text, in whatever order they come.

    Raises ValueError for an entry that `load` would not take back.
    """
    for entry in entries:
        if wrong := _wrong(entry):
            raise ValueError(f"a block table's entry {wrong}")
    ordered = sorted(entries, key=_order)
    return json.dumps({"schema": SCHEMA, "entries": ordered}, indent=1, sort_keys=True) + "\n"


def _order(entry: Entry) -> tuple[Any, ...]:
    same = json.dumps(entry["same"], sort_keys=True)
    return entry["kernel"], entry["chip"], same, sorted(entry["near"].items())


def _wrong(entry: object) -> str | None:
    if not isinstance(entry, dict):
        return "is not an object"
    for key, allowed in _TYPES.items():
        if key not in entry:
            return f"has no {key!r}"
        if not isinstance(entry[key], allowed) or isinstance(entry[key], bool):
            return f"has {entry[key]!r} as {key!r}"
    for key, size in entry["near"].items():
        if not isinstance(size, int) or size < 1:
            return f"has {size!r} as the size of {key!r}"
    return None


def _damaged(path: object, why: str) -> ValueError:
    return ValueError(
        f"{path} is not a block table of smalti, or is damaged ({why}): restore it, or delete it "
        "and tune again"
    )


def _bucket(size: int) -> int:
    """The least power of two that holds it."""
    return 1 << (size - 1).bit_length()


def _half_lanes(size: int) -> int:
    return math.ceil(size / 64) * 64
