"""How long a training step would take on TPUs that are not here: an estimate, by the TPU compiler.

    python -m nanogpt_jax.estimate --config configs/gpt2_124m_v6e_16.yaml --topology v6e:4x4 \
      --impl xla/xla,ours/pallas --rows 8

The step is the one that training runs, compiled ahead of time for a slice; `smalti.estimate` prices
its schedule. Exit codes: 0 done, 1 no compiler or a program that cannot be priced, 2 the input is
wrong (one line says how).
"""

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

from nanogpt_jax.attention import IMPL_SCOPE, PREPROCESS_SCOPE, make_attention
from nanogpt_jax.cli import command
from nanogpt_jax.config import (
    Config,
    UserError,
    add_config_arguments,
    load_config,
    parse_config,
)
from nanogpt_jax.model import init_params
from nanogpt_jax.optimizer import make_optimizer
from nanogpt_jax.sample import make_forward
from nanogpt_jax.sharding import AXIS
from nanogpt_jax.step import init_state, make_train_step
from smalti.chips import TENSOR_CORES, find_chip
from smalti.estimate import CompileFailed, EstimateError, Program, compile_for, estimate
from smalti.files import write_whole

PARTS = {IMPL_SCOPE: "attention", PREPROCESS_SCOPE: "preprocess"}
REST = "rest"
# XLA's operations simulated where they can be, or as the compiler estimates them.
PRICES = ("simulation", "compiler")
LABEL = "estimate; uncalibrated: no published time of a whole step says its batch"
ASSUMPTIONS = (
    "operations run one after the other; asynchronous copies overlap fully with those beside them",
    "an operation that the compiler fused belongs to the part that its last one comes from",
    "waiting for the host, for data and for other chips is not counted",
    "XLA's operations that are alike in kind, origin, bytes and the compiler's cycles take the "
    "simulation of one of them",
)


class Variant(NamedTuple):
    """What is compared: `attention.impl` and `attention.preprocess`, written "ours/pallas"."""

    impl: str
    preprocess: str

    def __str__(self) -> str:
        return f"{self.impl}/{self.preprocess}"


def compile_step(config: Config, vocab_size: int, chip: str, topology: str) -> Program:
    """The training step of `config`, compiled for all devices of a slice.

    Raises UserError for a batch that does not divide, and what `compile_for` raises.
    """
    training, devices = config.training, count_devices(chip, topology)
    parts, rows = training.grad_accumulation, training.batch_size // training.grad_accumulation
    if rows % devices:
        raise UserError(
            f"training.batch_size: got {training.batch_size} in {parts} part(s) of {rows} rows for "
            f"{devices} devices of {topology}; the rows of a part must be a multiple of the devices"
        )
    optimizer = make_optimizer(config.optimizer, training.num_iterations)
    choice = make_attention(config, platform="tpu")
    forward = make_forward(config, choice.attention)
    step = make_train_step(forward, optimizer, None, choice.check_vma)
    state = jax.eval_shape(lambda: init_state(init_params(config.model, vocab_size, 0), optimizer))
    tokens = jax.ShapeDtypeStruct((parts, rows, training.seq_len), jnp.int32)
    divided = P(None, AXIS)
    return compile_for(
        step,
        *(state, tokens, tokens),
        chip=chip,
        topology=topology,
        mesh_axes={AXIS: devices},
        in_shardings=(P(), divided, divided),
        donate=(0,),
    )


def count_devices(chip: str, topology: str) -> int:
    """Of jax, in "v6e:4x4": 16. What is no topology is left to `compile_for` to refuse."""
    found = find_chip(TENSOR_CORES[chip].device_kind)
    sizes = re.findall(r"\d+", topology.partition(":")[2])
    return math.prod(map(int, sizes)) * (found.devices if found else 1)


def measure(program: Program) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A step's numbers, and the sentences of what was assumed.

    The numbers all add up over layers: cycles by part under both prices, those that are not of a
    simulation, for how long each unit is busy, memory, and what nobody prices. EstimateError: an
    operation that is not known.
    """
    result = estimate(program)
    ops = result.schedule.ops
    unpriced = {kind: {"count": 0, "bytes": 0} for kind in ("collectives", "others")}
    for op in ops:
        if op.cycles is None and op.count:
            found = unpriced["collectives" if op.kind == "collective" else "others"]
            found["count"] += op.count
            found["bytes"] += op.count * op.bytes_moved
    memory = program.memory
    kernels = [op for op in ops if op.kind == "kernel" and IMPL_SCOPE in op.op_name]
    in_kernels: dict[str, float] = {}
    for op in kernels:
        for unit, share in result.simulations[op.name].occupancy.items():
            in_kernels[unit] = in_kernels.get(unit, 0.0) + op.count * (op.cycles or 0.0) * share
    by_compiler = [
        op if op.compiler_cycles is None else replace(op, cycles=op.compiler_cycles) for op in ops
    ]
    numbers = {
        "cycles": {"simulation": parts_of(ops), "compiler": parts_of(by_compiler)},
        "cycles_not_simulated": sum(
            op.count * op.cycles for op in ops if op.cycles and op.priced_by != "simulation"
        ),
        "busy_cycles": {"step": result.busy_cycles, "attention_kernels": in_kernels},
        "memory": {
            "arguments_bytes": memory.arguments_bytes,
            "temporaries_bytes": memory.temporaries_bytes,
            "peak_bytes": memory.peak_bytes,
        },
        "unpriced": unpriced,
    }
    return numbers, result.summary.assumptions


def parts_of(ops: Iterable[Any]) -> dict[str, dict[str, float]]:
    """Cycles by part of the model, Pallas kernels and XLA's operations apart.

    ops: of a `smalti.estimate` schedule, forward and backward alike.
    """
    parts = {part: {"kernels": 0.0, "xla": 0.0} for part in (*PARTS.values(), REST)}
    for op in ops:
        if op.cycles:
            part = next((name for scope, name in PARTS.items() if scope in op.op_name), REST)
            parts[part]["kernels" if op.kind == "kernel" else "xla"] += op.count * op.cycles
    return parts


def at_layers(numbers: Sequence[dict[str, Any]], layers: Sequence[int], wanted: int) -> Any:
    """The numbers of `wanted` layers, on a straight line through those of two, or of one as is."""
    if len(layers) == 1:
        return numbers[0]
    (a, b), (x, y) = layers, numbers
    return jax.tree.map(lambda at_a, at_b: at_a + (at_b - at_a) * (wanted - a) / (b - a), x, y)


def rows_for(time: float, rows: Sequence[int], times: Sequence[float]) -> tuple[float, bool]:
    """The rows whose estimate is `time`, and whether that lies beyond those that were estimated.

    rows are at least two and ascending; between two of them the line is straight, and outside it
    goes on as it ended.
    """
    last = len(rows) - 2
    segment = next((i for i in range(last) if time <= times[i + 1]), last)
    (a, b), (x, y) = rows[segment : segment + 2], times[segment : segment + 2]
    return a + (b - a) * (time - x) / (y - x), not times[0] <= time <= times[-1]


def estimate_steps(
    config: Config,
    variants: Sequence[Variant],
    rows: Sequence[int],
    layers: Sequence[int],
    vocab_size: int,
    chip: str,
    topology: str,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One entry for each variant and number of rows a device.

    layers: how many are compiled, one number or two; of two, the model's own is extrapolated.
    An entry that the compiler refuses, for want of memory say, has a `reason` and no numbers.
    """
    core, devices = TENSOR_CORES[chip], count_devices(chip, topology)
    device = find_chip(core.device_kind)
    hbm_bytes = device.hbm_bytes / device.devices if device else None
    entries = []
    for variant in variants:
        for count in rows:
            entry: dict[str, Any] = {**variant._asdict(), "rows": count}
            entries.append(entry)
            numbers, assumptions = [], ()
            try:
                for depth in layers:
                    say(f"{variant}, {count} rows a device, {depth} layers")
                    changed = with_values(
                        config,
                        ("attention", "impl", variant.impl),
                        ("attention", "preprocess", variant.preprocess),
                        ("model", "num_layers", depth),
                        ("training", "batch_size", count * devices),
                    )
                    program = compile_step(changed, vocab_size, chip, topology)
                    found, assumptions = measure(program)
                    numbers.append(found)
            except CompileFailed as error:
                entry["reason"] = str(error)
                continue
            wanted = config.model.num_layers if len(layers) == 2 else layers[0]
            entry |= {"layers": wanted, **at_layers(numbers, layers, wanted)}
            entry["time_ns"], entry["attention_share"] = {}, {}
            for price, parts in entry["cycles"].items():
                total = sum(sum(part.values()) for part in parts.values())
                entry["time_ns"][price] = total / core.clock_hz * 1e9
                entry["attention_share"][price] = sum(parts["attention"].values()) / total
            entry["fits"] = None if hbm_bytes is None else entry["memory"]["peak_bytes"] < hbm_bytes
            entry["assumptions"] = [*assumptions]  # at the compiler's cycles
    add_speed_ups(entries)
    return entries


def add_speed_ups(entries: Sequence[dict[str, Any]]) -> None:
    """`speed_up` where it is known: the first variant's time at the same rows, over the entry's."""
    for entry in entries:
        first = next(other for other in entries if other["rows"] == entry["rows"])
        if "time_ns" in entry and "time_ns" in first:
            entry["speed_up"] = {
                price: first["time_ns"][price] / time for price, time in entry["time_ns"].items()
            }


def with_values(config: Config, *changes: tuple[str, str, Any]) -> Config:
    """A copy with some values changed and all of it checked; raises UserError."""
    values = config.model_dump()
    for section, key, value in changes:
        values[section][key] = value
    return parse_config(values, "the command line")


def explain_measured(
    entries: Sequence[dict[str, Any]], measured: dict[Variant, float]
) -> list[dict[str, Any]]:
    """Which rows a device would take as long as was measured (ns), by variant and price."""
    found = []
    for variant, time_ns in measured.items():
        own = [entry for entry in entries if variant_of(entry) == variant and "time_ns" in entry]
        for price in PRICES:
            times = [entry["time_ns"][price] for entry in own]
            if len(own) < 2 or any(b <= a for a, b in itertools.pairwise(times)):
                raise UserError(
                    f"--measured {variant}: needs estimates at two or more numbers of --rows, "
                    "which grow with them"
                )
            rows, beyond = rows_for(time_ns, [entry["rows"] for entry in own], times)
            numbers = {"time_ns": time_ns, "price": price, "rows": rows, "beyond": beyond}
            found.append({**variant._asdict(), **numbers})
    return found


def variant_of(entry: dict[str, Any]) -> Variant:
    return Variant(entry["impl"], entry["preprocess"])


def busiest(entry: dict[str, Any]) -> str:
    """What binds: the unit that works for longest, in the step and in attention's kernels."""
    parts = entry["cycles"]["simulation"]
    times = {
        "step": ("the step", sum(sum(part.values()) for part in parts.values())),
        "attention_kernels": ("attention's kernels", parts["attention"]["kernels"]),
    }
    words = []
    for key, (name, cycles) in times.items():
        busy = entry["busy_cycles"][key]
        if busy and cycles:
            unit = max(busy, key=lambda unit: busy[unit])
            words.append(f"{unit} for {busy[unit] / cycles:.0%} of {name}")
    return "busiest: " + ", ".join(words)


def show(record: dict[str, Any], out: Console) -> None:
    out.print(f"{record['label']}", highlight=False)
    table = Table(
        title=f"a training step on {record['topology']}, {record['devices']} devices, "
        f"{record['entries'][0].get('layers', record['num_layers'])} layers",
        box=box.SIMPLE,
        collapse_padding=True,
        caption="impl: attention/preprocess; rows: a device; times in ms; step: simulated; ×: the "
        "first one's over it; compiler: at the compiler's cycles; attn: attention in the step, its "
        "share, its Pallas kernels alone; prep: Q/K norm and RoPE; peak: of HBM, GB",
    )
    table.add_column("impl", no_wrap=True)
    columns = "rows", "step", "×", "compiler", "attn", "share", "kernels", "prep", "peak"
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    ms = 1e3 / record["clock_hz"]
    for entry in record["entries"]:
        head = str(variant_of(entry)), str(entry["rows"])
        if "reason" in entry:
            table.add_row(*head, "none")
            continue
        parts = entry["cycles"]["simulation"]
        attention, peak = parts["attention"], entry["memory"]["peak_bytes"]
        table.add_row(
            *head,
            f"{entry['time_ns']['simulation'] / 1e6:.1f}",
            f"{entry['speed_up']['simulation']:.2f}" if "speed_up" in entry else "–",
            f"{entry['time_ns']['compiler'] / 1e6:.1f}",
            f"{sum(attention.values()) * ms:.1f}",
            f"{entry['attention_share']['simulation']:.0%}",
            f"{attention['kernels'] * ms:.1f}",
            f"{sum(parts['preprocess'].values()) * ms:.1f}",
            f"{peak / 1e9:.1f}",
        )
    out.print(table)
    for entry in record["entries"]:
        who = f"{variant_of(entry)}, {entry['rows']} rows"
        if "reason" in entry:
            out.print(f"{who}: {entry['reason']}", highlight=False)
            continue
        words = [
            f"{found['count']:.0f} {kind} ({found['bytes'] / 1e9:.2f} GB)"
            for kind, found in entry["unpriced"].items()
            if found["count"]
        ]
        words = [f"{' and '.join(words)} have no price and add nothing"] if words else []
        total = entry["time_ns"]["simulation"] * record["clock_hz"] / 1e9
        kept = f"{entry['cycles_not_simulated'] / total:.0%} of the step are the compiler's cycles"
        full = ["its peak is more than the HBM"] if entry["fits"] is False else []
        out.print(f"{who}: {'; '.join([*full, busiest(entry), kept, *words])}", highlight=False)
    for found in record["measured"]:
        out.print(
            f"measured {found['time_ns'] / 1e6:.2f} ms with {variant_of(found)}: "
            f"{found['rows']:.1f} rows a device, by {found['price']}"
            + (", beyond what was estimated" if found["beyond"] else ""),
            highlight=False,
        )
    for sentence in record["assumptions"]:
        out.print(f"- {sentence}", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m nanogpt_jax.estimate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument("--chip", default="v6e", help="default: v6e")
    parser.add_argument("--topology", metavar="v6e:4x4", help="default: the chip's smallest slice")
    parser.add_argument(
        "--impl",
        metavar="A/P,B",
        help="attention.impl, or with attention.preprocess, as in xla/xla,ours/pallas; the first "
        "is what speed-ups are over; default: the config's",
    )
    parser.add_argument(
        "--rows", metavar="4,8", help="sequences a device and step; default: the config's"
    )
    parser.add_argument(
        "--layers",
        metavar="N[,M]",
        help="compile N layers for a quick look; N and M: extrapolate to the config's",
    )
    parser.add_argument("--vocab-size", type=int, default=50304, help="default: 50304")
    parser.add_argument(
        "--measured",
        metavar="xla=242.81,…",
        help="ms that were measured: which rows a device would explain them",
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers; -: print them alone")
    return parser


def _numbers(option: str, text: str, most: int | None = None) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or sorted(set(numbers)) != numbers:
        raise UserError(f"{option}: got {text!r}; write numbers from 1 on, ascending, such as 4,8")
    if most is not None and len(numbers) > most:
        raise UserError(f"{option}: got {len(numbers)} numbers; it takes at most {most}")
    return numbers


def _variant(text: str, config: Config) -> Variant:
    """ "ours/pallas", or "ours" with the config's preprocessing; UserError: there is none such."""
    impl, slash, preprocess = text.partition("/")
    variant = Variant(impl, preprocess if slash else config.attention.preprocess)
    for key, value in variant._asdict().items():
        with_values(config, ("attention", key, value))
    return variant


def _measured(text: str | None, variants: Sequence[Variant]) -> dict[Variant, float]:
    """ "xla=242.81" → {Variant("xla", …): 242.81e6}, in ns."""
    measured = {}
    for word in text.split(",") if text else ():
        name, _, ms = word.partition("=")
        variant = next((v for v in variants if name in (str(v), v.impl)), None)
        try:
            time_ns = float(ms) * 1e6
        except ValueError:
            time_ns = math.nan
        if variant is None or not time_ns > 0:
            raise UserError(
                f"--measured: got {word!r}; write one of {', '.join(map(str, variants))}, '=' and "
                "milliseconds"
            )
        measured[variant] = time_ns
    return measured


def run(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The record that --json writes. Raises UserError, and what `compile_for` raises."""
    config = load_config(args.config, args.override)
    if args.chip not in TENSOR_CORES:
        raise UserError(f"--chip: got {args.chip!r}; it is one of {', '.join(TENSOR_CORES)}")
    if args.vocab_size < 1:
        raise UserError(f"--vocab-size: got {args.vocab_size}; it must be at least 1")
    topology = args.topology or TENSOR_CORES[args.chip].topology
    devices = count_devices(args.chip, topology)
    words = args.impl.split(",") if args.impl else [config.attention.impl]
    variants = [_variant(word, config) for word in words]
    if not args.rows and config.training.batch_size % devices:
        raise UserError(
            f"training.batch_size: got {config.training.batch_size} for {devices} devices of "
            f"{topology}; give --rows"
        )
    rows = _numbers("--rows", args.rows or str(config.training.batch_size // devices))
    layers = _numbers("--layers", args.layers or str(config.model.num_layers), most=2)
    measured = _measured(args.measured, variants)
    if measured and len(rows) < 2:
        raise UserError("--measured: needs two or more numbers of --rows to go by")
    entries = estimate_steps(
        config, variants, rows, layers, args.vocab_size, args.chip, topology, say
    )
    depths = " and ".join(map(str, layers))
    extrapolated = [f"extrapolated from {depths} layers"] * (len(layers) == 2)
    return {
        "label": LABEL,
        "chip": args.chip,
        "topology": topology,
        "devices": devices,
        "clock_hz": TENSOR_CORES[args.chip].clock_hz,
        "num_layers": config.model.num_layers,
        "layers_compiled": layers,
        "vocab_size": args.vocab_size,
        "config": config.model_dump(),
        "entries": entries,
        "measured": explain_measured(entries, measured),
        "assumptions": [*extrapolated, *ASSUMPTIONS],
    }


@command
def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        record = run(args, lambda text: print(f"compiling {text}", file=sys.stderr, flush=True))
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        if args.json and args.json != "-":
            path = Path(args.json)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
    except (UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (EstimateError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; what was compiled is kept, and the same command goes on", file=sys.stderr)
        return 130
    if args.json == "-":
        print(text, end="")
    else:
        show(record, Console())
    return 1 if all("reason" in entry for entry in record["entries"]) else 0


if __name__ == "__main__":
    sys.exit(main())
