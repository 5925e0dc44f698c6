"""Training: `python -m nanogpt_jax.train --config configs/smoke.yaml --override run.seed=1`.

Exit codes: 0 done, 1 the loss is no longer a number, or memory or the disk is full, 2 the input is
wrong (one line says how), 130 and 143 stopped by Ctrl-C or SIGTERM after saving.
"""

import argparse
import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nanogpt_jax import sharding
from nanogpt_jax.attention import AttentionChoice, make_attention
from nanogpt_jax.checkpoint import Checkpoints, check_fit, make_meta
from nanogpt_jax.cli import command
from nanogpt_jax.config import Config, UserError, add_config_arguments, load_config
from nanogpt_jax.data import Batches, Dataset, load
from nanogpt_jax.evaluate import make_evaluate
from nanogpt_jax.generate import Generator, make_generator
from nanogpt_jax.metrics import check_sinks, open_sinks, plot_losses, read_records
from nanogpt_jax.model import count_params, flops_per_token, init_params
from nanogpt_jax.optimizer import make_optimizer, make_schedule
from nanogpt_jax.progress import Display
from nanogpt_jax.run_folder import WriteError, latest_run, locked, new_run, write_text
from nanogpt_jax.sample import encode_prompt, make_forward, make_sampler, on_one_device
from nanogpt_jax.step import Forward, State, init_state, make_train_step
from smalti.chips import peak_flops_per_s


class NotFinite(Exception):
    """A loss or gradient is NaN or infinite."""


class Signals:
    """The first Ctrl-C or SIGTERM asks for a stop after the step; the second stops at once."""

    received: int | None = None

    def __enter__(self):
        self._before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number, frame):
        del frame
        self.received = number
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def stop(self) -> bool:
        return self.received is not None


@dataclass
class Setup:
    """All that is checked before a folder is made or a step compiled."""

    config: Config
    dataset: Dataset
    batches: Batches
    choice: AttentionChoice
    forward: Forward
    generator: Generator
    mesh: Mesh


def set_up(config: Config) -> Setup:
    """Raises UserError for whatever in the config cannot work here."""
    training = config.training
    try:
        dataset = load(config.data.corpus, config.data.tokenizer, config.data.val_fraction)
        batches = Batches(
            dataset.train_tokens,
            training.batch_size,
            training.seq_len,
            config.run.seed,
            jax.process_index(),
            jax.process_count(),
            dataset.train_documents,
        )
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise UserError(f"data: {error}") from None
    if len(dataset.val_tokens) <= training.seq_len:
        raise UserError(
            f"training.seq_len: got {training.seq_len}, but the validation set has "
            f"{len(dataset.val_tokens)} tokens, and one window takes {training.seq_len + 1}; use a "
            "shorter seq_len, more text or a larger data.val_fraction"
        )
    sharding.check_batch(config)
    check_sinks(config)
    if config.sampling.num_tokens:
        encode_prompt(dataset.tokenizer, config.sampling.prompt)
    choice = make_attention(config)
    forward = make_forward(config, choice.attention)
    generator = make_generator(config, choice, forward)
    return Setup(config, dataset, batches, choice, forward, generator, sharding.make_mesh())


def describe(setup: Setup, parameters: int) -> list[str]:
    """The first lines of the log: what runs, and why."""
    config, data, model = setup.config, setup.dataset, setup.config.model
    optimizer, training = config.optimizer, config.training
    device = jax.devices()[0]
    peak = peak_flops_per_s(device.device_kind)
    mfu = "no MFU, as its peak is not known" if peak is None else f"peak {peak / 1e12:.0f} TFLOP/s"
    return [
        f"data: {config.data.corpus}, {data.tokenizer.name} tokens, vocabulary "
        f"{data.tokenizer.vocab_size}, {len(data.train_tokens):,} for training and "
        f"{len(data.val_tokens):,} for validation",
        f"model: {model.num_layers} layers, dim {model.dim}, {model.num_heads} heads "
        f"({model.kv_heads} of keys), {parameters:,} parameters, {training.dtype}",
        *setup.choice.description,
        *([setup.generator.description] if config.sampling.num_tokens else []),
        f"optimizer: {optimizer.name}, {optimizer.schedule}",
        f"steps: {training.num_iterations} of {training.batch_size} × {training.seq_len} tokens, "
        f"in {training.grad_accumulation} part(s)",
        f"devices: {jax.device_count()} × {device.device_kind} ({mfu})",
    ]


def train(config: Config, resume: bool) -> int:
    """Runs the whole training; returns the exit code."""
    if config.run.distributed:
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"run.distributed: got true, but the processes do not find each other: "
                f"{' '.join(str(error).split())}; start it on each host of a TPU slice, or set "
                "run.distributed to false"
            ) from None
    setup = set_up(config)
    optimizer = make_optimizer(config.optimizer, config.training.num_iterations)
    params = init_params(config.model, setup.dataset.tokenizer.vocab_size, config.run.seed)
    parameters = count_params(params)
    state = sharding.replicate(init_state(params, optimizer), setup.mesh)
    del params

    folder = latest_run(config) if resume else new_run(config)
    first_process = jax.process_index() == 0
    with locked(folder) if first_process else contextlib.nullcontext():
        return _train_in(folder, setup, optimizer, state, parameters, resume)


def _train_in(
    folder: Path, setup: Setup, optimizer, state: State, parameters: int, resume: bool
) -> int:
    config = setup.config
    checkpoints = Checkpoints(
        folder / "checkpoints", config.checkpoint.keep_last, config.checkpoint.keep_best
    )
    state, seconds, notes = _resume(setup, checkpoints, state) if resume else (state, 0.0, [])
    first, total = int(state.step), config.training.num_iterations
    loop = Loop(setup, folder, checkpoints, make_train_step_of(setup, optimizer), seconds)
    if first > total or (first == total and not loop.lacks(first)):
        steps = (
            f"{first} of {total} steps" if first == total else f"{first} steps, {total} asked for"
        )
        print(f"{folder} is complete: {steps}; set training.num_iterations higher to go on")
        return 0
    if jax.process_index() == 0:
        write_text(folder / "config.yaml", config.to_yaml())

    with Display(first, total, config.logging.every) as display:
        display.say(f"run: {folder}" + (f", resumed after step {first}" if resume else ""))
        for line in [*describe(setup, parameters), *notes]:
            display.say(line)
        with Signals() as signals:
            if first == total:
                return loop.complete(state, display, signals)
            return loop.run(state, display, signals)


def make_train_step_of(setup: Setup, optimizer) -> Callable:
    return make_train_step(setup.forward, optimizer, setup.mesh, setup.choice.check_vma)


def load_batch(setup: Setup, index: int) -> tuple[jax.Array, ...]:
    """Inputs and targets [parts, rows, S] of the step after `index` others, on the devices."""
    parts = setup.config.training.grad_accumulation
    return tuple(
        sharding.shard_rows(x.reshape(parts, -1, x.shape[-1]), setup.mesh, axis=1)
        for x in setup.batches.batch(index)
    )


def _resume(setup: Setup, checkpoints: Checkpoints, state: State) -> tuple[State, float, list[str]]:
    """The newest state, the seconds of training behind it, and remarks."""
    checkpoints.clean()
    steps = checkpoints.steps()
    if not steps:
        return state, 0.0, ["no checkpoint was saved yet: starting from the beginning"]
    meta = checkpoints.meta(steps[-1])
    notes = check_fit(meta, setup.config, setup.dataset, checkpoints.path(steps[-1]))
    return checkpoints.restore(steps[-1], state), meta["time_s"], notes


class Loop:
    """The steps of a run, with all that happens between them."""

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        checkpoints: Checkpoints,
        train_step: Callable,
        seconds: float,
    ):
        config, tokenizer = setup.config, setup.dataset.tokenizer
        self.setup, self.config, self.folder = setup, config, folder
        self.checkpoints, self.train_step, self.seconds = checkpoints, train_step, seconds
        self.evaluate = make_evaluate(
            setup.forward, setup.dataset, config.training, setup.mesh, setup.choice.check_vma
        )
        self.sampler = make_sampler(setup.generator, tokenizer)
        self.schedule = make_schedule(config.optimizer, config.training.num_iterations)
        S = config.training.seq_len
        self.flops_per_token = flops_per_token(
            config.model, tokenizer.vocab_size, setup.choice.visible_pairs / S
        )
        self.peak = peak_flops_per_s(jax.devices()[0].device_kind)

    def run(self, state: State, display: Display, signals: Signals) -> int:
        training, total = self.config.training, self.config.training.num_iterations
        self.sinks = []
        if jax.process_index() == 0:
            self.sinks = open_sinks(self.config, self.folder, int(state.step))
        batch, val_loss = load_batch(self.setup, int(state.step)), None
        try:
            for step in range(int(state.step) + 1, total + 1):
                start = time.perf_counter()
                state, measures = self.train_step(state, *batch)
                if step < total:
                    batch = load_batch(self.setup, step)  # while the devices work
                measures = {name: float(value) for name, value in measures.items()}
                seconds = time.perf_counter() - start
                self.seconds += seconds
                self.check_finite(step, measures)

                last = step == total
                val_loss = None
                if last or step % training.eval_every == 0:
                    windows = None if last else training.eval_windows
                    val_loss = self.evaluate(state.params, windows, signals.stop)
                    self.check_finite(step, {"val_loss": val_loss or 0.0})
                self.log(step, measures, val_loss, seconds, display)
                if last or step % self.config.checkpoint.every == 0 or signals.stop():
                    self.save(state, measures, val_loss)
                if signals.stop():
                    return self.interrupted(step, signals, display)
                every = self.config.sampling.every
                if every and step % every == 0 and not last:
                    self.sample(state, step, display)
        except NotFinite as error:
            display.say(str(error))
            return 1
        finally:
            for sink in self.sinks:
                sink.close()
        assert val_loss is not None, "the last step was evaluated"
        return self.finish(state, val_loss, display)

    def finish(self, state: State, val_loss: float, display: Display) -> int:
        self.sample(state, int(state.step), display)
        self.plot()
        display.say(f"done: {self.folder}, validation loss {val_loss:.4f}, {self.seconds:.0f} s")
        return 0

    def last_record(self, step: int) -> dict[str, Any]:
        """That of the last step; raises UserError where metrics.jsonl has lost it."""
        path = self.folder / "metrics.jsonl"
        *_, record = [{"step": 0}, *(read_records(path, step) if path.exists() else ())]
        if record["step"] != step:
            raise UserError(
                f"{path}: has no record of step {step}, the last one that was trained; put the "
                "file back to finish the run"
            )
        return record

    def lacks(self, step: int) -> bool:
        """Whether a run stopped after its last step still needs its validation loss or a file."""
        saved = self.checkpoints.path(step).stat().st_mtime
        names = ["loss.png"] + ["sample.txt"] * bool(self.config.sampling.num_tokens)
        files = [self.folder / name for name in names]
        late = any(not file.exists() or file.stat().st_mtime < saved for file in files)
        return late or self.last_record(step)["val_loss"] is None

    def complete(self, state: State, display: Display, signals: Signals) -> int:
        """What was left to do after the last step was saved."""
        step = int(state.step)
        record = self.last_record(step)
        val_loss = record["val_loss"]
        if val_loss is None:
            val_loss = self.evaluate(state.params, None, signals.stop)
            if val_loss is None:
                return self.interrupted(step, signals, display)
            try:
                self.check_finite(step, {"val_loss": val_loss})
            except NotFinite as error:
                display.say(str(error))
                return 1
            if jax.process_index() == 0:
                for sink in open_sinks(self.config, self.folder, step - 1):
                    sink.log({**record, "val_loss": val_loss})
                    sink.close()
        return self.finish(state, val_loss, display)

    def check_finite(self, step: int, values: Mapping[str, float]) -> None:
        """Losses by name, and the norms of what would spoil the next one."""
        wrong = [f"{k} is {v}" for k, v in values.items() if not math.isfinite(v)]
        if not wrong:
            return
        rows = self.setup.batches.positions(step - 1)
        saved = self.checkpoints.steps()
        good = self.checkpoints.path(saved[-1]) if saved else "none was saved yet"
        more = f" and {len(rows) - 1} more rows" if len(rows) > 1 else ""
        raise NotFinite(
            f"stopped at step {step}: {', '.join(wrong)}; its batch: {rows[0]}{more} of seed "
            f"{self.config.run.seed}; last good checkpoint: {good}. Lower the learning rates or "
            "clip_norm, or look at that text"
        )

    def log(
        self,
        step: int,
        measures: Mapping[str, float],
        val_loss: float | None,
        seconds: float,
        display: Display,
    ) -> None:
        training = self.config.training
        rate = training.batch_size * training.seq_len / seconds
        used = rate * self.flops_per_token / jax.device_count()
        record = {
            "step": step,
            **measures,
            "val_loss": val_loss,
            "rate_factor": float(np.asarray(self.schedule(step - 1))),
            "tokens": step * training.batch_size * training.seq_len,
            "tokens_per_s": rate,
            "time_s": self.seconds,
            "mfu": None if self.peak is None else used / self.peak,
        }
        for sink in self.sinks:
            sink.log(record)
        display.step(step, measures["train_loss"], val_loss, rate)

    def save(self, state: State, measures: Mapping[str, float], val_loss: float | None) -> None:
        measured: dict[str, Any] = {**measures, "val_loss": val_loss, "time_s": self.seconds}
        self.checkpoints.save(state, make_meta(self.config, self.setup.dataset, **measured))

    def sample(self, state: State, step: int, display: Display) -> None:
        options = self.config.sampling
        if not options.num_tokens or jax.process_index():
            return
        text = options.prompt + "".join(self.sampler(on_one_device(state.params), options))
        write_text(self.folder / "sample.txt", text + "\n")
        display.say(f"--- text written at step {step} ---\n{text}\n---")

    def plot(self) -> None:
        if jax.process_index() == 0:
            plot_losses(self.folder / "metrics.jsonl", self.folder / "loss.png")

    def interrupted(self, step: int, signals: Signals, display: Display) -> int:
        self.plot()
        number = signals.received or signal.SIGINT
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        display.say(
            f"stopped by {name}: step {step} is saved in {self.checkpoints.path(step)}; --resume "
            "goes on from there"
        )
        return 128 + number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m nanogpt_jax.train", description=__doc__
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print the whole config and stop"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the newest run of this name"
    )
    return parser


def run_safely(config: Config, resume: bool) -> int:
    """`train`, with a line on stderr and an exit code for whatever stops it."""
    try:
        return train(config, resume)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except (WriteError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            "error: out of memory: take a smaller model.dim, training.batch_size or "
            "training.seq_len, more of training.grad_accumulation, or training.remat=true "
            f"({' '.join(str(error).split())[:200]})",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(
            "stopped at once by Ctrl-C; --resume goes on from the last checkpoint, "
            "or from the start where there is none"
        )
        return 130


@command
def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        config = load_config(args.config, args.override)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.print_config:
        print(config.to_yaml(), end="")
        return 0
    return run_safely(config, args.resume)


if __name__ == "__main__":
    sys.exit(main())
