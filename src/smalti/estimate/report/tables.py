"""Records as tables on a terminal. Needs rich, which the extra `cli` brings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smalti.estimate.report.diff import Change, Comparison
from smalti.estimate.report.entry import OCCUPANCY, lowered_words
from smalti.estimate.report.record import entries_of

LONGEST_LINES = 40
_WIDTH_OF_NUMBERS = 56  # of the columns before a source line, and the frame


def show_attention(console: Console, record: Mapping[str, Any], *, verbose: bool = False) -> None:
    """The peers side by side, the quickest first, and what each is busy with."""
    case = record["case"]
    shape = ",".join(f"{key}={case[key]}" for key in ("B", "Hq", "Hkv", "Sq", "Sk", "D"))
    table = _table(
        f"attention {record['pass']} on {record['chip']}: {shape} {case['dtype']}, mask "
        f"{case['mask']}, {case['layout']}"
    )
    table.add_column("")
    for heading in ("µs", "cycles", "of kernels", "HBM MB", "busiest unit", "÷ best peer"):
        table.add_column(heading, justify="right", no_wrap=True)
    entries = _quickest_first(record)
    for name, found in entries.items():
        _row(
            table,
            name,
            _at_least(found) + _us(found["time_ns"]),
            _at_least(found) + _count(found["cycles"]),
            _count(found["cycles_kernels"]) if found["kernels"] else "no kernel",
            _mb(found["bytes_hbm"]),
            _bound(found),
            f"{found['ratio_to_best_peer']:.2f}×" if found["ratio_to_best_peer"] else "",
        )
    if entries:
        _print(console, table)
        _say(console, record["label"])
        _print_occupancy(console, entries)
    for name, found in entries.items():
        tried = record["tried"].get(name, ())
        of = f", the best of {len(tried)} variants" if len(tried) > 1 else ""
        _say(console, f"{found['variant']}{of}")
        _say_failed(console, tried, verbose)
        if found["unpriced"]:
            many = sum(op["count"] for op in found["unpriced"])
            _say(console, f"  a lower bound: {many} of its operations have no price")
    for name, reason in record["reasons"].items():
        _say(console, f"{name}: none, because {reason if verbose else _first_line(reason)}")
        _say_failed(console, record["tried"].get(name, ()), verbose)
    for found in list(entries.values())[:1]:
        _say_basis(console, found)
    assumed = [text for found in entries.values() for text in found["assumptions"]]
    for text in dict.fromkeys(assumed) if verbose else ():
        _say(console, f"assumed: {text}")


def show_fn(
    console: Console,
    record: Mapping[str, Any],
    *,
    longest: int | None = None,
    verbose: bool = False,
) -> None:
    """One function: totals, memory, kernels, and its operations in the order they run.

    longest: only so many operations, the longest first.
    """
    table = _table(f"{record['function']} on {record['topology']}", header=False)
    table.add_column("")
    table.add_column("", justify="right")
    memory = record["memory"]
    for name, value in (
        ("time", f"{_at_least(record)}{_us(record['time_ns'])} µs"),
        ("cycles", _at_least(record) + _count(record["cycles"])),
        ("  of Pallas kernels", _count(record["cycles_kernels"])),
        ("HBM read", f"{_mb(record['bytes_hbm_read'])} MB"),
        ("HBM written", f"{_mb(record['bytes_hbm_written'])} MB"),
        ("busiest unit", _bound(record)),
        ("memory: arguments", f"{_mb(memory['arguments_bytes'])} MB"),
        ("  results", f"{_mb(memory['outputs_bytes'] - memory['aliased_bytes'])} MB"),
        ("  temporaries", f"{_mb(memory['temporaries_bytes'])} MB"),
        ("  HBM peak", f"{_mb(memory['peak_bytes'])} MB"),
    ):
        _row(table, name, value)
    _print(console, table)
    _say(console, record["label"])
    _say(console, f"what was lowered: {lowered_words(record)}")
    _print_occupancy(console, {record["name"]: record})
    _print_kernels(console, record)
    _print_ops(console, record, longest)
    _say_basis(console, record)
    for text in record["assumptions"]:
        _say(console, f"assumed: {text}")
    if record["unpriced"] and verbose:
        for op in record["unpriced"]:
            _say(
                console,
                f"without a price: {op['count']}× {op['opcode']} {op['name']} {op['op_name']}",
            )


def show_source(console: Console, name: str, found: Mapping[str, Any], limit: int = LONGEST_LINES):
    """The lines of each kernel, for one execution of it; they add up to its cycles."""
    if not found["kernels"]:
        _say(console, f"{name}: no Pallas kernel, so no lines")
    for kernel in found["kernels"]:
        cycles = kernel["cycles"]
        table = _table(f"{name}: {', '.join(kernel['ops'])}, {_count(cycles)} cycles")
        for heading in ("cycles", "%", "empty", "spills"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("line", no_wrap=True)
        table.add_column("", no_wrap=True)
        lines = kernel["lines"]
        widest = max((len(_place(line)) for line in lines[:limit]), default=0)
        room = max(console.width - widest - _WIDTH_OF_NUMBERS, 24)
        for line in lines[:limit]:
            _row(
                table,
                _count(line["cycles"]),
                f"{100 * line['cycles'] / cycles:.1f}",
                _count(line["empty_bundles"]) if line["empty_bundles"] else "",
                _count(line["spills"]) if line["spills"] else "",
                _place(line),
                _clip(line["text"] or line["what"] or "", room),
            )
        if rest := lines[limit:]:
            share = sum(line["cycles"] for line in rest)
            _row(
                table,
                _count(share),
                f"{100 * share / cycles:.1f}",
                _count(sum(line["empty_bundles"] for line in rest)),
                _count(sum(line["spills"] for line in rest)),
                "",
                f"{len(rest)} more lines, which --json lists",
            )
        _print(console, table)
    if found["kernels"]:
        _say(console, f"{found['label']}")


def show_comparison(console: Console, compared: Comparison, limit: int = LONGEST_LINES) -> None:
    table = _table(f"{compared.name}: totals")
    _add_change_columns(table, "")
    for change in compared.totals:
        _row(table, change.what, *_change_cells(change))
    _print(console, table)
    _say(console, compared.label)
    for note in compared.notes:
        _say(console, f"differs: {note}")
    table = _table(f"{compared.name}: cycles by line, the largest changes first")
    _add_change_columns(table, "line")
    for change in compared.lines[:limit]:
        _row(table, change.what, *_change_cells(change))
    if compared.lines:
        _print(console, table)
    if len(compared.lines) > limit:
        rest = sum(change.difference for change in compared.lines[limit:])
        _say(console, f"{len(compared.lines) - limit} more lines changed, by {rest:+,.0f} cycles")
    many = "one line is" if compared.lines_equal == 1 else f"{compared.lines_equal} lines are"
    _say(console, f"{many} equal in both")


def _print_occupancy(console: Console, entries: Mapping[str, Mapping[str, Any]]) -> None:
    table = _table("busy, % of the simulated time; HBM: of all the time")
    table.add_column("")
    for heading in OCCUPANCY:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, found in entries.items():
        shares = [found["occupancy"].get(unit) for unit in OCCUPANCY.values()]
        _row(table, name, *("" if share is None else f"{100 * share:.0f}" for share in shares))
    _print(console, table)


def _print_kernels(console: Console, record: Mapping[str, Any]) -> None:
    if not record["kernels"]:
        return
    table = _table("Pallas kernels, one execution of each")
    table.add_column("", overflow="fold")
    for heading in (
        "runs",
        "cycles",
        "waiting",
        "MXU waits",
        "HBM MB",
        "busiest unit",
        "VMEM MB",
        "SMEM KB",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for kernel in record["kernels"]:
        hbm = sum(n for route, n in kernel["bytes"].items() if "hbm" in route)
        vmem = kernel["vmem_bytes"]
        _row(
            table,
            ", ".join(kernel["ops"]),
            str(kernel["executions"]),
            _count(kernel["cycles"]),
            _count(kernel["cycles_waiting"]),
            _count(kernel["cycles_mxu"]),
            _mb(hbm),
            _bound(kernel),
            "unknown" if vmem is None else _mb(vmem),
            f"{kernel['smem_bytes'] / 1e3:.1f}",
        )
    _print(console, table)


def _print_ops(console: Console, record: Mapping[str, Any], longest: int | None) -> None:
    ops = record["ops"]
    title = "operations, in the order they run"
    if longest is not None:
        ops = sorted(ops, key=lambda op: -(op["cycles"] or 0) * op["count"])[:longest]
        title = f"the {len(ops)} longest of {len(record['ops'])} operations"
    table = _table(title)
    for heading in ("cycles", "%", "runs", "HBM MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("operation", overflow="fold")
    table.add_column("cycles from")
    table.add_column("line", no_wrap=True, overflow="ellipsis")
    for op in ops:
        total = None if op["cycles"] is None else op["cycles"] * op["count"]
        moved = (op["bytes_hbm_read"] or 0) + (op["bytes_hbm_written"] or 0)
        beside = f", on the {op['thread']}" if op["thread"] else ""
        _row(
            table,
            "?" if total is None else _count(total),
            "?" if total is None else f"{100 * total / max(record['cycles'], 1):.1f}",
            "" if op["count"] == 1 else f"{op['count']}×",
            _mb(moved * op["count"]),
            " › ".join([*op["path"], op["name"]]) + beside,
            _priced(op),
            _place(op),
        )
    _print(console, table)


def _priced(op: Mapping[str, Any]) -> str:
    """What an operation's cycles are from; of one simulated in XLA's place, XLA's own as well."""
    theirs = op.get("compiler_cycles")
    if theirs is None:
        return op["priced_by"]
    return f"simulation (compiler: {_count(theirs * op['count'])})"


def _say_basis(console: Console, found: Mapping[str, Any]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    _say(console, f"{found['label']} ({versions})")
    _say(console, f"the unit is {found['unit']}")


def _say_failed(console: Console, tried: Sequence[Mapping[str, Any]], verbose: bool) -> None:
    failed = [one for one in tried if one.get("reason")]
    if not failed or len(tried) == 1:  # the one reason is the peer's
        return
    if not verbose:
        many = f"{len(failed)} variants" if len(failed) > 1 else "one variant"
        _say(console, f"  {many} of {len(tried)} gave no estimate: --verbose says why")
        return
    for one in failed:
        _say(console, f"  {one['variant']}: {one['reason']}")


def _quickest_first(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(sorted(entries_of(record).items(), key=lambda item: item[1]["cycles"]))


def _add_change_columns(table: Table, first: str) -> None:
    table.add_column(first, overflow="fold")
    for heading in ("before", "after", "change", "%"):
        table.add_column(heading, justify="right", no_wrap=True)


def _change_cells(change: Change) -> tuple[str, str, str, str]:
    write = _share if change.what.startswith("occupancy") else _count
    percent = (
        f"{100 * change.difference / change.before:+.1f}"
        if change.before and change.after is not None
        else ""
    )
    sign = "+" if change.difference > 0 else ""
    return (
        "" if change.before is None else write(change.before),
        "" if change.after is None else write(change.after),
        f"{sign}{write(change.difference)}",
        percent,
    )


def _table(title: str, header: bool = True) -> Table:
    return Table(title=title, show_header=header)


def _row(table: Table, *cells: str) -> None:
    # As Text: brackets in a line of source are no markup.
    table.add_row(*map(Text, cells))


def _print(console: Console, table: Table) -> None:
    # A table's own title is broken to its width.
    title, table.title = str(table.title), None
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _at_least(found: Mapping[str, Any]) -> str:
    """Before a time that leaves out operations without a price."""
    return "≥ " if found["unpriced"] else ""


def _bound(found: Mapping[str, Any]) -> str:
    """The busiest unit, and how busy: far from 100 %, latency binds and not the unit."""
    share = found["occupancy"].get(found["bound"])
    return found["bound"] if share is None else f"{found['bound']} {100 * share:.0f} %"


def _place(line: Mapping[str, Any]) -> str:
    return f"{Path(line['file']).name}:{line['line']}" if line["file"] else ""


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _us(time_ns: float) -> str:
    return f"{time_ns / 1e3:,.1f}"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.2f}" if size < 1e8 else f"{size / 1e6:,.0f}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
