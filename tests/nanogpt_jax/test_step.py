"""A step: accumulation changes nothing but rounding, nor do eight devices."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from nanogpt_jax.attention import make_attention
from nanogpt_jax.config import UserError
from nanogpt_jax.metrics import read_records
from nanogpt_jax.sample import make_forward
from nanogpt_jax.sharding import check_batch, make_mesh
from nanogpt_jax.step import make_loss_and_grad

from .conftest import arguments, tiny_config
from .test_model import SEQ, VOCAB, random_params


def parts_of(count, rows=8):
    inputs, targets = jax.random.randint(jax.random.key(5), (2, rows, SEQ), 0, VOCAB)
    return (x.reshape(count, rows // count, SEQ) for x in (inputs, targets))


def test_accumulation_equals_the_whole_batch():
    config = tiny_config()
    params = random_params(config)
    forward = make_forward(config, make_attention(config).attention)
    step = jax.jit(make_loss_and_grad(forward, make_mesh()))
    loss, grad = step(params, *parts_of(1))
    for count in (2, 8):
        loss_in_parts, grad_in_parts = step(params, *parts_of(count))
        np.testing.assert_allclose(loss_in_parts, loss, rtol=1e-6)
        for whole, summed in zip(
            jax.tree.leaves(grad), jax.tree.leaves(grad_in_parts), strict=True
        ):
            size = float(abs(whole).max())
            np.testing.assert_allclose(summed, whole, rtol=1e-5, atol=1e-6 * size)


def test_the_loss_is_the_mean_over_all_tokens():
    """Against the plain formula, without shard_map."""
    config = tiny_config()
    params = random_params(config)
    forward = make_forward(config, make_attention(config).attention)
    loss, _ = jax.jit(make_loss_and_grad(forward, make_mesh()))(params, *parts_of(2))
    inputs, targets = (x[0] for x in parts_of(1))
    log_p = np.asarray(jax.nn.log_softmax(jax.jit(forward)(params, inputs)))
    expected = -np.take_along_axis(log_p, np.asarray(targets)[..., None], -1).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_rows_must_divide_among_the_devices(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with pytest.raises(UserError) as error:
        check_batch(tiny_config("training.batch_size=8", "training.grad_accumulation=2"))
    assert str(error.value) == (
        "training.batch_size: got 8 in 2 part(s) of 4 rows for 8 devices; the rows of a part must "
        "be a multiple of the devices"
    )


@pytest.mark.slow
@pytest.mark.parametrize("option", ["preprocess=xla", "preprocess=pallas", "interpret=true"])
def test_eight_devices_give_the_losses_of_one(tmp_path, run_train, option):
    options = (
        *("attention.impl=ours", f"attention.{option}"),
        *("training.batch_size=16", "training.grad_accumulation=2", "training.num_iterations=3"),
        *("sampling.num_tokens=0", "training.eval_every=3", "checkpoint.every=3"),
    )
    code, out, err = run_train(*options, "run.name=one")
    assert code == 0, err
    assert "devices: 1 × cpu" in out
    done = subprocess.run(
        [sys.executable, "-m", "nanogpt_jax.train", *arguments(*options, "run.name=eight")],
        cwd=tmp_path,
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "devices: 8 × cpu" in done.stdout
    one, eight = (
        list(read_records(tmp_path / "runs" / name / "metrics.jsonl")) for name in ("one", "eight")
    )
    assert len(one) == len(eight) == 3
    for key in ("train_loss", "grad_norm"):
        np.testing.assert_allclose([r[key] for r in eight], [r[key] for r in one], rtol=2e-5)
    np.testing.assert_allclose(eight[-1]["val_loss"], one[-1]["val_loss"], rtol=2e-5)
