"""Runs side by side, and masks.

    python -m nanogpt_jax.compare runs/shakespeare runs/shakespeare-2
    python -m nanogpt_jax.compare --config configs/masks.yaml

Of two runs it prints the largest difference of their losses and where it is, and draws both curves.
Two ways to compute the same attention differ by rounding only: the difference starts there and
grows slowly, as training amplifies it.

Of a config it trains the model under several masks, with several seeds, times their training steps
side by side and estimates them for a TPU; stopped and started again, it goes on. Exit codes are
those of nanogpt_jax.train.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nanogpt_jax import compare_masks as masks
from nanogpt_jax.cli import command, writing_to
from nanogpt_jax.compare_masks import Arm
from nanogpt_jax.config import UserError, add_config_arguments, load_config
from nanogpt_jax.data.names import path_argument
from nanogpt_jax.metrics import read_records
from smalti.chips import TENSOR_CORES
from smalti.files import write_whole

LOSSES = {"train_loss": "training", "val_loss": "validation"}


class Difference(NamedTuple):
    """The largest |a − b| of one loss, in nats per token, up to one step."""

    loss: str
    up_to_step: int
    largest: float
    step: int  # where it is
    a: float
    b: float


def read_losses(run: Path) -> dict[str, dict[int, float]]:
    """{"train_loss": {step: loss}, "val_loss": …} of a run's folder."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run}: no metrics.jsonl in it; name the folder of a run, runs/<name>")
    records = list(read_records(path))
    if not records:
        raise UserError(f"{path}: no record in it yet")
    return {loss: {r["step"]: r[loss] for r in records if r[loss] is not None} for loss in LOSSES}


def differences(a: dict, b: dict) -> Iterator[Difference]:
    """Over the first tenth of the steps that both runs have, and over all of them."""
    for loss in LOSSES:
        shared = sorted(a[loss].keys() & b[loss].keys())
        for count in (len(shared) // 10, len(shared)):
            steps = shared[:count]
            if steps:
                worst = max(steps, key=lambda step: abs(a[loss][step] - b[loss][step]))
                pair = a[loss][worst], b[loss][worst]
                yield Difference(loss, steps[-1], abs(pair[0] - pair[1]), worst, *pair)


def plot(runs: dict[str, dict], png: Path) -> None:
    """Above, the losses of the runs; below, how far each is from the first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 6), sharex=True, layout="constrained", height_ratios=(2, 1)
    )
    (_, first), *others = runs.items()
    for (name, losses), style in zip(runs.items(), ("-", "--"), strict=True):
        for loss, label in LOSSES.items():
            above.plot(
                *zip(*losses[loss].items(), strict=True), style, lw=1, label=f"{name}, {label}"
            )
    ((_, second),) = others
    for loss, label in LOSSES.items():
        steps = sorted(first[loss].keys() & second[loss].keys())
        gaps = [abs(first[loss][step] - second[loss][step]) for step in steps]
        below.plot(steps, gaps, lw=1, label=label)
        if any(gaps):
            below.set_yscale("log", nonpositive="clip")
    above.set(ylabel="loss (nats per token)")
    below.set(xlabel="step", ylabel="difference")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(png, dpi=120)
    plt.close(figure)


def compare_runs(args: argparse.Namespace) -> int:
    losses = [read_losses(run) for run in args.runs]
    found = list(differences(*losses))
    if not found:
        raise UserError(f"{args.runs[0]} and {args.runs[1]} have no step in common")
    for d in found:
        print(
            f"{LOSSES[d.loss]} loss up to step {d.up_to_step}: largest difference "
            f"{d.largest:.2e}, at step {d.step} ({d.a:.6f}, {d.b:.6f})"
        )
    if args.out:
        with writing_to("--out", args.out):
            plot(dict(zip(map(str, args.runs), losses, strict=True)), args.out)
    return 0


def compare_masks(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.override)
    arms = [_arm(word) for word in args.masks] or masks.default_arms(config.training.seq_len)
    runs = masks.plan_runs(config, arms, _seeds(args.seeds))
    if args.rounds < 1:
        raise UserError(f"--rounds: got {args.rounds}; it must be at least 1")
    if args.chip not in (*TENSOR_CORES, "none"):
        raise UserError(f"--chip: got {args.chip!r}; it is one of {', '.join(TENSOR_CORES)}, none")
    if code := masks.train_all(runs, _say):
        if code in (130, 143):
            print("this comparison needs no --resume: the same command goes on", file=sys.stderr)
        return code
    chip = None if args.chip == "none" else args.chip
    record = masks.compare(config, arms, runs, args.rounds, chip, _say)
    folder = Path(config.run.dir) / config.run.name
    json_path, png = args.json or folder / "comparison.json", args.out or folder / "comparison.png"
    with writing_to("--json", json_path):
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(json_path, json.dumps(record, indent=1) + "\n")
    with writing_to("--out", png):
        write_whole(png, masks.plot(record))
    print("\n".join([*masks.table(record), f"written: {json_path}, {png}"]))
    return 0


def _arm(text: str) -> Arm:
    """ "window=sliding_window(256)"; raises UserError."""
    name, equals, mask = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise UserError(
            f"--masks: got {text!r}; write a name of letters and digits, '=' and a mask, as in "
            "'window=sliding_window(256)'"
        )
    return Arm(name, mask)


def _seeds(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds: got {text!r}; write whole numbers, as in 0,1,2") from None


def _say(words: str) -> None:
    print(f"({words})", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m nanogpt_jax.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="*", type=path_argument, metavar="RUN", help="a folder, runs/<name>: two"
    )
    parser.add_argument("--out", type=path_argument, help="draw the curves into this PNG")
    group = parser.add_argument_group("masks")
    add_config_arguments(group, required=False)
    group.add_argument(
        "--masks",
        nargs="+",
        default=[],
        metavar="NAME=MASK",
        help="the first is what the others are held against; default: dense, window, streaming and "
        "documents",
    )
    group.add_argument("--seeds", default="0,1,2", metavar="N,…", help="default: 0,1,2")
    group.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="timed steps of each, after 3 others"
    )
    group.add_argument("--chip", default="v6e", help="to estimate for, or none; default: v6e")
    group.add_argument(
        "--json",
        type=path_argument,
        metavar="FILE",
        help="default: comparison.json of the config's run",
    )
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    of_masks = args.config or args.override or args.masks or args.json
    if bool(of_masks) == bool(args.runs) or len(args.runs) != (0 if args.config else 2):
        parser.error("give two folders of runs, or --config and no folder")
    try:
        return compare_runs(args) if args.runs else compare_masks(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
