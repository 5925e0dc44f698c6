"""Where the numbers of a run go: always metrics.jsonl, and W&B or TensorBoard if asked for."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from nanogpt_jax.config import Config, UserError
from nanogpt_jax.run_folder import write_text, writing

Record = Mapping[str, Any]
"""One step: `step`, `train_loss`, `val_loss` (None between evaluations), and other numbers."""


class Sink(Protocol):
    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line, floats in full, on disk when `log` returns."""

    def __init__(self, path: Path, last_step: int = 0):
        """Goes on after `last_step`: later records, and a torn one, are removed."""
        if path.exists():
            kept = "".join(json.dumps(r) + "\n" for r in read_records(path, last_step))
            write_text(path, kept)
        self._path = path
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def log(self, record: Record) -> None:
        with writing(self._path):
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


def read_records(path: Path, last_step: int | None = None) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl up to `last_step`; a last line without its end is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(True)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read: {error}; it must be a file of JSON lines"
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            return
        try:
            record = json.loads(line)
            step = record["step"]
            val_loss = record["val_loss"]
            numbers = [record["train_loss"], 0.0 if val_loss is None else val_loss]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{path}: line {number} is no record; remove that line") from None
        if type(step) is not int or any(type(x) not in (int, float) for x in numbers):
            raise UserError(
                f"{path}: line {number} is no record: step must be an integer and the losses "
                "numbers; remove that line"
            )
        if last_step is None or step <= last_step:
            yield record


class Wandb:
    """Weights & Biases; its own settings come from its environment variables."""

    def __init__(self, config: Config, folder: Path, last_step: int):
        wandb = _import("wandb", "logging.wandb")
        self._run = wandb.init(
            project=config.logging.wandb_project,
            name=folder.name,
            dir=str(folder),
            config=config.model_dump(),
            resume="allow" if last_step else None,
        )

    def log(self, record: Record) -> None:
        self._run.log({k: v for k, v in record.items() if v is not None}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


class TensorBoard:
    """Event files in runs/<name>/tensorboard."""

    def __init__(self, config: Config, folder: Path, last_step: int):
        del config
        writer = _import("tensorboardX", "logging.tensorboard").SummaryWriter
        purge = last_step + 1 if last_step else None
        self._writer = writer(str(folder / "tensorboard"), purge_step=purge)

    def log(self, record: Record) -> None:
        for key, value in record.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self._writer.close()


def check_sinks(config: Config) -> None:
    """Raises UserError when a package that the config asks for is missing."""
    if config.logging.wandb:
        _import("wandb", "logging.wandb")
    if config.logging.tensorboard:
        _import("tensorboardX", "logging.tensorboard")


def open_sinks(config: Config, folder: Path, last_step: int) -> list[Sink]:
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", last_step)]
    if config.logging.wandb:
        sinks.append(Wandb(config, folder, last_step))
    if config.logging.tensorboard:
        sinks.append(TensorBoard(config, folder, last_step))
    return sinks


def _import(package: str, key: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        extra = key.rpartition(".")[2]
        raise UserError(
            f"{key}: got true, but the package {package} is not installed; install it with "
            f"`pip install 'smalti[{extra}]'`, or set {key} to false"
        ) from None


def plot_losses(metrics: Path, png: Path) -> None:
    """The curves of both losses, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = list(read_records(metrics))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        [r["step"] for r in records], [r["train_loss"] for r in records], lw=0.8, label="training"
    )
    measured = [(r["step"], r["val_loss"]) for r in records if r["val_loss"] is not None]
    if measured:
        steps, losses = zip(*measured, strict=True)
        label = f"validation ({losses[-1]:.3f} at the end)"
        axes.plot(steps, losses, marker="o", ms=3, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=png.absolute().parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    with writing(png):
        figure.savefig(png, dpi=120)
    plt.close(figure)
