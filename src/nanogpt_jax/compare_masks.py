"""Does a sparse mask train as well? One model under several masks, over several seeds.

Each mask and seed is a run of its own, `<dir>/<name>/<mask's name>.seed<n>`, and is trained by
`nanogpt_jax.train`; what is there already is not trained again. Then the training steps are timed
side by side, and estimated for a TPU.
"""

import io
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml

from nanogpt_jax import train
from nanogpt_jax.attention import make_attention
from nanogpt_jax.config import Config, UserError, parse_config
from nanogpt_jax.estimate import PARTS, Variant, estimate_steps, with_values
from nanogpt_jax.metrics import read_records
from nanogpt_jax.model import init_params
from nanogpt_jax.optimizer import make_optimizer
from nanogpt_jax.step import init_state
from smalti.chips import TENSOR_CORES
from smalti.estimate import EstimateError

WARM_UP = 3  # steps of each mask before those that are timed


class Arm(NamedTuple):
    """One mask of the comparison, by the name that its runs and its curve have."""

    name: str
    mask: str  # as smalti.masks.parse reads it


def default_arms(S: int) -> list[Arm]:
    """Dense, and three masks of far fewer pairs: an eighth of S in view, and four documents."""
    quarter, window = -(-S // 4), -(-S // 8)
    lengths = [min(quarter, S - first) for first in range(0, S, quarter)]
    return [
        Arm("dense", "causal()"),
        Arm("window", f"sliding_window({window})"),
        Arm("streaming", f"streaming(sinks=4, window={window})"),
        Arm("documents", f"document(lengths={lengths}) & causal()"),
    ]


class Run(NamedTuple):
    """One training: its config says all of it, and where its folder is."""

    arm: Arm
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir) / self.config.run.name

    def is_complete(self) -> bool:
        """Whether it has its last validation loss.

        Raises UserError where the folder is a run of another config.
        """
        if not (self.folder / "config.yaml").is_file():
            return False
        values = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
        there, wanted = (c.model_dump() for c in (parse_config(values, "it"), self.config))
        for section, keys in wanted.items():
            for key, value in keys.items():
                if section != "logging" and there[section][key] != value:
                    raise UserError(
                        f"{self.folder}: was trained with {section}.{key}={there[section][key]!r}, "
                        f"not {value!r}; give another --override run.name, or remove that folder"
                    )
        records = self.records()
        total = self.config.training.num_iterations
        return (
            bool(records) and records[-1]["step"] == total and records[-1]["val_loss"] is not None
        )

    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return list(read_records(path)) if path.is_file() else []

    def val_losses(self) -> dict[int, float]:
        return {r["step"]: r["val_loss"] for r in self.records() if r["val_loss"] is not None}


def plan_runs(config: Config, arms: Sequence[Arm], seeds: Sequence[int]) -> list[Run]:
    """All runs, seed by seed, so that a comparison that is stopped has whole seeds.

    Raises UserError for masks that cannot be trained under, names that are none and doubles.
    """
    for what, given in (("--masks", [arm.name for arm in arms]), ("--seeds", seeds)):
        if doubles := [x for x in given if list(given).count(x) > 1]:
            raise UserError(f"{what}: got {doubles[0]!r} twice; each is trained once")
    runs = []
    for seed in seeds:
        for arm in arms:
            own = with_values(
                config,
                ("run", "dir", str(Path(config.run.dir) / config.run.name)),
                ("run", "name", f"{arm.name}.seed{seed}"),
                ("run", "seed", seed),
                ("attention", "impl", "flex"),
                ("attention", "mask", arm.mask),
            )
            runs.append(Run(arm, seed, own))
    for run in runs[: len(arms)]:
        make_attention(run.config)
    return runs


def train_all(runs: Sequence[Run], say: Callable[[str], None]) -> int:
    """Trains what is not complete; 0, or the exit code of the training that did not end well."""
    complete = [run.is_complete() for run in runs]
    for number, (run, is_complete) in enumerate(zip(runs, complete, strict=True), 1):
        say(f"run {number} of {len(runs)}: {run.folder}{', complete' * is_complete}")
        if is_complete:
            continue
        began = (run.folder / "config.yaml").is_file()
        if run.folder.exists() and not began:
            raise UserError(f"{run.folder}: is there but is no run; remove it")
        code = train.run_safely(run.config, resume=began)
        if code:
            return code
        jax.clear_caches()  # of programs that no later run uses
    return 0


def time_steps(
    setups: Sequence[train.Setup], rounds: int, say: Callable[[str], None]
) -> list[list[float]]:
    """Seconds of training steps of each setup, of `rounds` turns about with one another."""
    steps = []
    for setup in setups:
        config, vocab_size = setup.config, setup.dataset.tokenizer.vocab_size
        optimizer = make_optimizer(config.optimizer, config.training.num_iterations)
        state = init_state(init_params(config.model, vocab_size, config.run.seed), optimizer)
        state = train.sharding.replicate(state, setup.mesh)
        steps.append([train.make_train_step_of(setup, optimizer), state, setup])
    samples: list[list[float]] = [[] for _ in setups]
    for turn in range(WARM_UP + rounds):
        say(f"timing steps, turn {turn + 1} of {WARM_UP + rounds}")
        order = range(len(setups)) if turn % 2 == 0 else reversed(range(len(setups)))
        for i in order:
            step, state, setup = steps[i]
            batch = jax.block_until_ready(train.load_batch(setup, turn))
            start = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, *batch))
            seconds = time.perf_counter() - start
            steps[i][1] = state
            if turn >= WARM_UP:
                samples[i].append(seconds)
    return samples


def estimate_step(config: Config, vocab_size: int, chip: str) -> dict[str, Any]:
    """A training step of `config` on one chip, bfloat16, all of it in smalti's kernels.

    `time_ns`, and `attention_ns`, the part of it that depends on the mask. Or a `reason`.
    """
    on_tpu = with_values(
        config,
        ("training", "dtype", "bfloat16"),
        ("attention", "preprocess", "pallas"),
    )
    variant = Variant(on_tpu.attention.impl, on_tpu.attention.preprocess)
    rows, layers = [config.training.batch_size], [config.model.num_layers]
    core = TENSOR_CORES[chip]
    try:
        (entry,) = estimate_steps(on_tpu, [variant], rows, layers, vocab_size, chip, core.topology)
    except EstimateError as error:
        return {"reason": str(error)}
    if "reason" in entry:
        return {"reason": entry["reason"]}
    attention = sum(entry["cycles"]["simulation"][PARTS["attention.impl"]].values())
    return {
        "time_ns": entry["time_ns"]["simulation"],
        "attention_ns": attention / core.clock_hz * 1e9,
    }


def compare(
    config: Config,
    arms: Sequence[Arm],
    runs: Sequence[Run],
    rounds: int,
    chip: str | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The record of trained runs; the first arm is what the others are held against."""
    setups = [train.set_up(run.config) for run in runs[: len(arms)]]
    samples = time_steps(setups, rounds, say)
    S, entries = config.training.seq_len, []
    for arm, setup, seconds in zip(arms, setups, samples, strict=True):
        own = [run for run in runs if run.arm == arm]
        pairs = setup.choice.visible_pairs
        entry: dict[str, Any] = {
            **arm._asdict(),
            "visible_pairs": pairs,
            "visible_of_causal": pairs / (S * (S + 1) / 2),
            "val_losses": {run.seed: run.val_losses() for run in own},
            "step_samples_s": seconds,
            "estimate": None,
        }
        if chip is not None:
            say(f"estimating a step of {arm.name} on {chip}")
            vocab_size = setup.dataset.tokenizer.vocab_size
            entry["estimate"] = estimate_step(setup.config, vocab_size, chip)
        entries.append(entry)
    return {"chip": chip, "config": config.model_dump(), "arms": entries}


def summarise(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Each arm's `loss` (mean over seeds), `sd`, `paired` and `paired_sd` (its loss less the first
    arm's of the same seed), `step_s`, `step_ns` (estimated, or None) and `to_target`.

    to_target: steps until its mean curve has come down to `target`, which all arms reach: the worst
    one's loss at the last evaluation that took as many windows as all before it.
    """
    last = record["config"]["training"]["num_iterations"]
    curves = [mean_curve(arm["val_losses"], last) for arm in record["arms"]]
    target = max(curve[max(curve)] for curve in curves) if all(curves) else math.nan
    first = record["arms"][0]["val_losses"]
    rows = []
    for arm, curve in zip(record["arms"], curves, strict=True):
        losses = {seed: by_step[last] for seed, by_step in arm["val_losses"].items()}
        paired = [loss - first[seed][last] for seed, loss in losses.items()]
        estimate = arm["estimate"] or {}
        rows.append(
            {
                "name": arm["name"],
                "mask": arm["mask"],
                "loss": statistics.fmean(losses.values()),
                "sd": spread(list(losses.values())),
                "paired": statistics.fmean(paired),
                "paired_sd": spread(paired),
                "step_s": statistics.median(arm["step_samples_s"]),
                "step_ns": estimate.get("time_ns"),
                "attention_ns": estimate.get("attention_ns"),
                "target": target,
                "to_target": reached(curve, target),
            }
        )
    return rows


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation over seeds, of one unknown."""
    return statistics.stdev(values) if len(values) > 1 else None


def mean_curve(val_losses: dict[int, dict[int, float]], last: int) -> dict[int, float]:
    """Over seeds, without the last step's, which is the mean of more windows than the others."""
    by_seed = list(val_losses.values())
    return {
        step: statistics.fmean(losses[step] for losses in by_seed)
        for step in sorted(by_seed[0])
        if step < last
    }


def reached(curve: dict[int, float], target: float) -> float | None:
    """The step at which the straight lines through `curve` first come down to `target`."""
    before = None
    for step, loss in curve.items():
        if loss <= target:
            if before is None:
                return float(step)
            step_before, loss_before = before
            share = (loss_before - target) / (loss_before - loss)
            return step_before + share * (step - step_before)
        before = step, loss
    return None


def table(record: dict[str, Any]) -> list[str]:
    """Lines to read."""
    rows = summarise(record)
    base, chip = rows[0], record["chip"]
    seeds = len(record["arms"][0]["val_losses"])
    lines = [
        f"validation loss: nats per token, mean ± standard deviation over {seeds} seed(s); "
        f"− {base['name']}: of the same seed",
        "a step: the median on this machine"
        + (f"; by estimate on {chip}, the kernels of attention alone last" if chip else ""),
        "",
        f"{'':>10} | {'validation loss':>15} | {'− ' + base['name']:>16} | {'step, ms':>8} | "
        f"{'×':>4} | {'TPU, µs':>7} | {'×':>4} | {'kernels':>7}",
    ]
    for row, arm in zip(rows, record["arms"], strict=True):
        estimated = f"{'–':>7} | {'–':>4} | {'–':>7}"
        if row["step_ns"] is not None:
            gain = f"{base['step_ns'] / row['step_ns']:.2f}" if base["step_ns"] else "–"
            kernels = f"{row['attention_ns'] / 1e3:.1f}"
            estimated = f"{row['step_ns'] / 1e3:>7.1f} | {gain:>4} | {kernels:>7}"
        lines.append(
            f"{row['name']:>10} | {_with_sd(row['loss'], row['sd'], ''):>15} "
            f"| {_with_sd(row['paired'], row['paired_sd'], '+'):>16} | {row['step_s'] * 1e3:>8.1f} "
            f"| {base['step_s'] / row['step_s']:>4.2f} | {estimated}"
        )
        if reason := (arm["estimate"] or {}).get("reason"):
            lines.append(f"{'':>10} | no estimate: {' '.join(reason.split())}")
    if any(row["to_target"] is None for row in rows):
        return lines
    lines += ["", f"until the mean curve comes down to {base['target']:.4f}, which all reach:"]
    for row in rows:
        steps = row["to_target"]
        tpu = "" if row["step_ns"] is None else f", {steps * row['step_ns'] / 1e6:.0f} ms of {chip}"
        lines.append(f"{row['name']:>10} | {steps:.0f} steps, {steps * row['step_s']:.0f} s{tpu}")
    return lines


def _with_sd(value: float, sd: float | None, sign: str) -> str:
    text = f"{value:{sign}.4f}"
    return text if sd is None else f"{text} ± {sd:.4f}"


def plot(record: dict[str, Any]) -> bytes:
    """A PNG: mean validation losses, with the range over seeds, by measured and estimated time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = summarise(record)
    has_estimates = any(row["step_ns"] is not None for row in rows)
    scales = [("step_s", 1.0, "seconds of training on this machine")]
    if has_estimates:
        label = f"milliseconds of training on {record['chip']}, estimated"
        scales.append(("step_ns", 1e-6, label))
    figure, panels = plt.subplots(
        1, len(scales) + 1, figsize=(4.6 * (len(scales) + 1), 4.2), layout="constrained"
    )
    last = record["config"]["training"]["num_iterations"]
    for axes, (key, unit, label) in zip(panels, scales, strict=False):
        for color, (row, arm) in enumerate(zip(rows, record["arms"], strict=True)):
            curve = mean_curve(arm["val_losses"], last)
            if row[key] is None or not curve:
                continue
            times = np.array(list(curve)) * row[key] * unit
            by_seed = np.array([[x[s] for s in curve] for x in arm["val_losses"].values()])
            axes.plot(times, list(curve.values()), "o-", ms=3, lw=1.2, label=row["name"])
            axes.fill_between(
                times, by_seed.min(axis=0), by_seed.max(axis=0), alpha=0.2, color=f"C{color}"
            )
        axes.set(xlabel=label, ylabel="validation loss (nats per token)", yscale="log")
        axes.yaxis.set_major_formatter("{x:.1f}")
        axes.yaxis.set_minor_formatter("{x:.1f}")
    for i, (row, arm) in enumerate(zip(rows, record["arms"], strict=True)):
        losses = [by_step[last] for by_step in arm["val_losses"].values()]
        panels[-1].plot([i] * len(losses), losses, "o", ms=4, alpha=0.7, color=f"C{i}")
        panels[-1].plot([i], [row["loss"]], "_", ms=24, color=f"C{i}")
    panels[-1].set(
        ylabel=f"after step {last}, each seed",
        xticks=range(len(rows)),
        xlim=(-0.5, len(rows) - 0.5),
    )
    panels[-1].set_xticks(range(len(rows)), [row["name"] for row in rows])
    for axes in panels:
        axes.grid(alpha=0.3)
    if panels[0].get_lines():
        panels[0].legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    plt.close(figure)
    return picture.getvalue()
