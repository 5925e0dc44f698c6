"""Two runs side by side: `python -m nanogpt_jax.compare runs/shakespeare runs/shakespeare-2`.

Prints the largest difference of their losses and where it is, and draws both curves. Two ways to
compute the same attention differ by rounding only: the difference starts there and grows slowly, as
training amplifies it.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nanogpt_jax.cli import command
from nanogpt_jax.config import UserError
from nanogpt_jax.data.names import path_argument
from nanogpt_jax.metrics import read_records

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


@command
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nanogpt_jax.compare", description="Compare two runs.")
    parser.add_argument(
        "runs", nargs=2, type=path_argument, metavar="RUN", help="a folder, runs/<name>"
    )
    parser.add_argument("--out", type=path_argument, help="draw the curves into this PNG")
    args = parser.parse_args(argv)
    try:
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
            try:
                plot(dict(zip(map(str, args.runs), losses, strict=True)), args.out)
            except (OSError, ValueError) as error:
                raise UserError(f"--out: cannot write {args.out}: {error}") from None
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
