"""Checkpoints with orbax: whole or not there at all, the last few and the best kept.

A checkpoint is the folder checkpoints/<step>/ with the items `params`, `optimizer` and `meta`
(config, fingerprint of the data, tokenizer, losses, checksums). It is written under another
name and renamed when complete, and renamed before it is deleted, so that a process killed at any
moment leaves only whole checkpoints under their names. What a killed one left is removed at the
next start.
"""

import hashlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from nanogpt_jax.config import Config, UserError, parse_config
from nanogpt_jax.data import Dataset, check_fingerprint
from nanogpt_jax.model import Params
from nanogpt_jax.run_folder import WriteError
from nanogpt_jax.step import State

# orbax reports every file at level WARNING or INFO; its failures are exceptions.
logging.getLogger("absl").setLevel(logging.ERROR)
# Of several writes that fail at once, one is raised, and asyncio would print the others in full.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)

_TRASH = ".deleting-"

MUST_MATCH = (
    "run.seed",
    "data",
    "model",
    "optimizer.name",
    "training.batch_size",
    "training.seq_len",
)
"""Without these the state would not fit, or the batches would be others than those not yet seen."""

ONLY_AROUND = ("run", "checkpoint", "logging", "sampling", "training.eval", "data.corpus")
"""Beginnings of what may change without a word: it does not touch the weights."""


META_TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "config": (dict,),
    "tokenizer": (str,),
    "fingerprint": (dict,),
    "device_count": (int,),
    "time_s": (int, float),
    "sha256": (dict,),
}
"""What every checkpoint says of itself."""


def sha256_of_arrays(tree: Any) -> str:
    """Of all leaves, in order; each is whole on every device."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf.addressable_data(0))
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class Checkpoints:
    """Those of one run; `keep_last` and `keep_best` as in the config."""

    def __init__(self, folder: Path, keep_last: int = 1, keep_best: bool = False):
        self.folder = folder.absolute()  # orbax takes no other
        self.keep_last, self.keep_best = keep_last, keep_best
        self._checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())

    def clean(self) -> None:
        """Removes what a killed process left half written or half deleted."""
        for path in self.folder.glob("*"):
            if path.name.startswith(_TRASH) or ".orbax-checkpoint-tmp" in path.name:
                shutil.rmtree(path)

    def steps(self) -> list[int]:
        return sorted(int(p.name) for p in self.folder.glob("*") if p.name.isdigit())

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def save(self, state: State, meta: Mapping[str, Any]) -> Path:
        """Writes the state under its step, unless it is there already, and deletes old ones."""
        step = int(state.step)
        if step not in self.steps():
            optimizer = (state.step, state.optimizer)
            sums = {
                "params": sha256_of_arrays(state.params),
                "optimizer": sha256_of_arrays(optimizer),
            }
            try:
                self._checkpointer.save(
                    self.path(step),
                    args=ocp.args.Composite(
                        params=ocp.args.StandardSave(state.params),
                        optimizer=ocp.args.StandardSave(optimizer),
                        meta=ocp.args.JsonSave({**meta, "step": step, "sha256": sums}),
                    ),
                )
            except Exception as error:  # of many kinds, as the one for a full disk
                raise WriteError(
                    f"cannot write the checkpoint {self.path(step)} ({_reason(error)}); those "
                    "before are whole: make room there, and --resume goes on from the last one"
                ) from error
            if jax.process_index() == 0:
                self._delete_old()
        return self.path(step)

    def meta(self, step: int) -> dict[str, Any]:
        meta = self._read(step, meta=ocp.args.JsonRestore())["meta"]
        if not isinstance(meta, dict) or "config" not in meta or "tokenizer" not in meta:
            raise UserError(f"checkpoint: {self.path(step)} is none of nanogpt_jax; remove it")
        for key, types in META_TYPES.items():
            if type(meta.get(key)) not in types:
                got = f"got {meta[key]!r:.60}" if key in meta else "it is missing"
                raise UserError(
                    f"checkpoint: {self.path(step) / 'meta'}: {key}: {got}, where "
                    f"{' or '.join(t.__name__ for t in types)} must be; move {self.path(step)} "
                    "away to go on from the one before"
                )
        if type(meta.get("val_loss")) not in (int, float, type(None)):
            raise UserError(
                f"checkpoint: {self.path(step) / 'meta'}: val_loss: got {meta['val_loss']!r:.60}, "
                f"where a number or null must be; move {self.path(step)} away"
            )
        return meta

    def restore(self, step: int, like: State) -> State:
        """The state saved at `step`, in the shapes, dtypes and shardings of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        read = self._read(
            step,
            params=ocp.args.StandardRestore(abstract.params),
            optimizer=ocp.args.StandardRestore((abstract.step, abstract.optimizer)),
        )
        self._check_sums(step, read)
        return State(read["optimizer"][0], read["params"], read["optimizer"][1])

    def restore_params(self, step: int, like: Params) -> Params:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        read = self._read(step, params=ocp.args.StandardRestore(abstract))
        self._check_sums(step, read)
        return read["params"]

    def _check_sums(self, step: int, read: Any) -> None:
        sums = self.meta(step)["sha256"]
        for item in ("params", "optimizer"):
            if item in read and sha256_of_arrays(read[item]) != sums.get(item):
                raise UserError(
                    f"checkpoint: {self.path(step)} is damaged: its {item} are not what was "
                    "saved; move it away to go on from the one before"
                )

    def _read(self, step: int, **args: Any) -> Any:
        try:
            return self._checkpointer.restore(self.path(step), args=ocp.args.Composite(**args))
        except Exception as error:  # orbax and tensorstore raise many kinds for a damaged file
            raise UserError(
                f"checkpoint: {self.path(step)} cannot be read ({_reason(error)}); move it away "
                "to go on from the one before"
            ) from error

    def _delete_old(self) -> None:
        steps = self.steps()
        keep = set(steps[-self.keep_last :])
        if self.keep_best:
            losses = {step: self.meta(step).get("val_loss") for step in steps}
            measured = {step: loss for step, loss in losses.items() if loss is not None}
            if measured:
                keep.add(min(measured, key=lambda step: (measured[step], -step)))
        for step in set(steps) - keep:
            trash = self.folder / f"{_TRASH}{step}"
            self.path(step).rename(trash)
            shutil.rmtree(trash)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def make_meta(config: Config, dataset: Dataset, **measured: Any) -> dict[str, Any]:
    return {
        "config": config.model_dump(),
        "fingerprint": dict(dataset.fingerprint),
        "tokenizer": dataset.tokenizer.to_json(),
        "device_count": jax.device_count(),
        **measured,
    }


def check_fit(meta: Mapping[str, Any], config: Config, dataset: Dataset, where: Path) -> list[str]:
    """Raises UserError that names each field in which the checkpoint does not fit.

    Returns what does differ, fits, and makes the continued run another than the first one was.
    """
    saved = parse_config(meta["config"], str(where))
    changes = {
        path: (before, now)
        for path, before in _flat(saved.model_dump()).items()
        if before != (now := _flat(config.model_dump())[path])
    }
    # The data are compared by what is in them; where they lie, or a default's name, is no matter.
    wrong = {
        path: change
        for path, change in changes.items()
        if (
            any(path == m or path.startswith(m + ".") for m in MUST_MATCH)
            and not path.startswith("data.")
        )
        # Clipping or none is another state of the optimizer; how much is not.
        or (path == "optimizer.clip_norm" and None in change)
    }
    if wrong:
        differences = "; ".join(
            f"{path} is {before!r} there and {now!r} in the config"
            for path, (before, now) in wrong.items()
        )
        raise UserError(f"checkpoint: {where} does not fit: {differences}. Start a new run instead")
    try:
        check_fingerprint(meta["fingerprint"], dataset.fingerprint)
    except ValueError as error:
        raise UserError(f"checkpoint: {where} does not fit: {error}") from None
    notes = [
        f"{path}: {before!r} until step {meta['step']}, {now!r} from now on"
        for path, (before, now) in changes.items()
        if not path.startswith((*ONLY_AROUND, "data."))
    ]
    if meta["device_count"] != jax.device_count():
        notes.append(
            f"devices: {meta['device_count']} until step {meta['step']}, {jax.device_count()} from "
            "now on: losses agree to rounding with those of an uninterrupted run, not bit by bit"
        )
    return notes


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        inner = isinstance(value, Mapping)
        flat |= _flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return flat
