"""Checkpoints: whole, few, and only for the run that they fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanogpt_jax.checkpoint import META_TYPES, Checkpoints, check_fit, make_meta
from nanogpt_jax.config import UserError
from nanogpt_jax.data import load
from nanogpt_jax.model import init_params
from nanogpt_jax.optimizer import make_optimizer
from nanogpt_jax.step import State, init_state

from .conftest import tiny_config


@pytest.fixture(scope="module")
def dataset():
    return load("sample", "char")


def state_at(step, config=None):
    config = config or tiny_config("optimizer.name=muon")
    params = init_params(config.model, 11, step)
    optimizer = make_optimizer(config.optimizer, 10)
    return init_state(params, optimizer)._replace(step=jnp.asarray(step, jnp.int32))


def meta_of(dataset, config=None, **measured):
    return make_meta(config or tiny_config(), dataset, time_s=1.0, **measured)


def test_what_is_saved_comes_back_bit_by_bit(tmp_path, dataset):
    checkpoints = Checkpoints(tmp_path)
    saved = state_at(3)
    checkpoints.save(saved, meta_of(dataset, val_loss=0.1 + 0.2))
    read = Checkpoints(tmp_path).restore(3, state_at(0))
    assert isinstance(read, State)
    assert jax.tree.structure(read) == jax.tree.structure(saved)
    jax.tree.map(np.testing.assert_array_equal, read, saved)
    assert checkpoints.meta(3)["val_loss"] == 0.1 + 0.2
    assert checkpoints.meta(3)["tokenizer"] == dataset.tokenizer.to_json()
    params = checkpoints.restore_params(3, saved.params)
    jax.tree.map(np.testing.assert_array_equal, params, saved.params)


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "kept"),
    [(1, False, [5]), (2, False, [4, 5]), (2, True, [2, 4, 5]), (9, True, [1, 2, 3, 4, 5])],
)
def test_the_last_few_and_the_best_are_kept(tmp_path, dataset, keep_last, keep_best, kept):
    checkpoints = Checkpoints(tmp_path, keep_last, keep_best)
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, None], 1):
        checkpoints.save(state_at(step), meta_of(dataset, val_loss=loss))
    assert checkpoints.steps() == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == list(map(str, kept))


def test_remains_of_a_killed_process_are_removed(tmp_path, dataset):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_at(1), meta_of(dataset))
    for name in ("2.orbax-checkpoint-tmp", ".deleting-0"):
        (tmp_path / name / "params").mkdir(parents=True)
    assert checkpoints.steps() == [1]
    checkpoints.clean()
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("item", ["params", "optimizer"])
def test_numbers_that_are_not_those_saved_are_refused(tmp_path, dataset, monkeypatch, item):
    """As after a flipped bit that the format itself does not notice."""
    checkpoints, state = Checkpoints(tmp_path), state_at(1)
    checkpoints.save(state, meta_of(dataset))
    read = checkpoints._read

    def flipped(step, **args):
        return {
            name: jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(1), value)
            if name == item
            else value
            for name, value in read(step, **args).items()
        }

    monkeypatch.setattr(checkpoints, "_read", flipped)
    damaged = rf"checkpoint: {tmp_path / '1'} is damaged: its {item} are not what was saved; move"
    with pytest.raises(UserError, match=damaged):
        checkpoints.restore(1, state)
    if item == "params":
        with pytest.raises(UserError, match=damaged):
            checkpoints.restore_params(1, state.params)
    else:
        checkpoints.restore_params(1, state.params)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        *((key, None, "it is missing") for key in META_TYPES if key not in ("config", "tokenizer")),
        ("config", None, "is none of nanogpt_jax"),
        ("step", "1", "step: got '1', where int must be"),
        ("device_count", True, "device_count: got True, where int must be"),
        ("fingerprint", [1], r"fingerprint: got [1], where dict must be"),
        ("time_s", "1", "time_s: got '1', where int or float must be"),
        ("val_loss", "x", "val_loss: got 'x', where a number or null must be"),
    ],
)
def test_a_meta_that_is_not_ours_is_named(tmp_path, dataset, monkeypatch, key, value, text):
    meta = {**meta_of(dataset), "step": 1, "sha256": {}} | {key: value}
    if value is None:
        del meta[key]
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoints, "_read", lambda *_, **__: {"meta": meta})
    with pytest.raises(UserError) as error:
        checkpoints.meta(1)
    assert str(error.value).startswith(f"checkpoint: {tmp_path / '1'}")
    assert text in str(error.value)
    assert key in str(error.value) or key == "config"


def test_a_damaged_checkpoint_is_named(tmp_path, dataset):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_at(1), meta_of(dataset))
    for path in (tmp_path / "1" / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(UserError) as error:
        checkpoints.restore(1, state_at(0))
    assert str(error.value).startswith(f"checkpoint: {tmp_path / '1'} cannot be read (")
    assert str(error.value).endswith("move it away to go on from the one before")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.dim=32", "does not fit: model.dim is 16 there and 32 in the config. Start"),
        ("model.num_layers=2", "model.num_layers is 1 there and 2 in the config"),
        ("optimizer.name=muon", "optimizer.name is 'adamw' there and 'muon' in the config"),
        ("training.seq_len=8", "training.seq_len is 16 there and 8 in the config"),
        ("training.batch_size=8", "training.batch_size is 4 there and 8 in the config"),
        ("run.seed=7", "run.seed is 0 there and 7 in the config"),
        ("optimizer.clip_norm=null", "optimizer.clip_norm is 1.0 there and None in the config"),
    ],
)
def test_a_config_that_does_not_fit_is_named_by_field(tmp_path, dataset, override, text):
    meta = meta_of(dataset) | {"step": 4}
    with pytest.raises(UserError) as error:
        check_fit(meta, tiny_config(override), dataset, tmp_path)
    assert text in str(error.value)


def test_other_data_are_named_by_field(tmp_path, dataset):
    meta = meta_of(dataset) | {"step": 4}
    with pytest.raises(
        UserError, match=r"does not fit: data: .*train_sha256: .* in the checkpoint"
    ):
        check_fit(meta, tiny_config(), load("sample", "char", 0.3), tmp_path)
    with pytest.raises(UserError, match="tokenizer: char in the checkpoint, byte now"):
        check_fit(meta, tiny_config("data.tokenizer=byte"), load("sample", "byte"), tmp_path)


def test_what_may_change_is_told(tmp_path, dataset, monkeypatch):
    meta = meta_of(dataset) | {"step": 4}
    assert check_fit(meta, tiny_config(), dataset, tmp_path) == []
    silent = ("logging.every=3", "run.name=other", "training.eval_windows=3", "checkpoint.every=4")
    assert check_fit(meta, tiny_config(*silent), dataset, tmp_path) == []
    assert check_fit(meta, tiny_config("optimizer.clip_norm=2.0"), dataset, tmp_path) == [
        "optimizer.clip_norm: 1.0 until step 4, 2.0 from now on"
    ]
    assert check_fit(meta, tiny_config("training.num_iterations=9"), dataset, tmp_path) == [
        "training.num_iterations: 6 until step 4, 9 from now on"
    ]
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    (note,) = check_fit(meta, tiny_config(), dataset, tmp_path)
    assert note.startswith("devices: 1 until step 4, 8 from now on: losses agree to rounding")
