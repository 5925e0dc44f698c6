"""Whole runs: what they leave, how they end, and that a killed one goes on bit by bit."""

import errno
import json
import math
import os
import random
import signal
import time

import jax
import numpy as np
import pytest
import yaml

from nanogpt_jax import train
from nanogpt_jax.config import UserError, load_config
from nanogpt_jax.metrics import read_records
from nanogpt_jax.run_folder import latest_run, locked, new_run

from .conftest import SMOKE, arguments, start, tiny_config

KEYS = {"step", "train_loss", "val_loss", "tokens_per_s", "time_s", "mfu", "grad_norm", "tokens"}


def losses(folder):
    return [
        (r["step"], r["train_loss"], r["val_loss"]) for r in read_records(folder / "metrics.jsonl")
    ]


def test_a_run_is_a_folder(tmp_path, run_train):
    code, out, err = run_train()
    assert (code, err) == (0, "")
    run = tmp_path / "runs" / "smoke"
    assert {p.name for p in run.iterdir()} == {
        *("config.yaml", "metrics.jsonl", "loss.png", "sample.txt", "checkpoints", "lock")
    }
    assert yaml.safe_load((run / "config.yaml").read_text()) == tiny_config().model_dump()
    records = list(read_records(run / "metrics.jsonl"))
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert all(r.keys() >= KEYS for r in records)
    assert [r["val_loss"] is not None for r in records] == [False, True] * 3
    assert {r["mfu"] for r in records} == {None}
    assert records[-1]["train_loss"] < records[0]["train_loss"]
    assert records[-1]["tokens"] == 6 * 4 * 16
    lines = out.splitlines()
    assert lines[0] == "run: runs/smoke"
    assert lines[3] == "attention.impl=xla: masked softmax over all S × S scores"
    assert "step 6/6  loss " in out
    assert "--- text written at step 6 ---" in out
    assert lines[-1].startswith("done: runs/smoke, validation loss ")


def test_runs_do_not_overwrite_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_config()
    with pytest.raises(UserError, match=r"--resume: no run runs/smoke to go on with; leave --re"):
        latest_run(config)
    folders = [new_run(config) for _ in range(3)]
    assert [str(p) for p in folders] == [*("runs/smoke", "runs/smoke-2", "runs/smoke-3")]
    for folder in folders:
        (folder / "config.yaml").write_text(config.to_yaml())
    new_run(tiny_config("run.name=smoke-x"))
    assert str(latest_run(config)) == "runs/smoke-3"
    assert str(latest_run(tiny_config("run.name=smoke-2"))) == "runs/smoke-2"


def test_resume_takes_no_run_of_another_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("smoke", "smoke-2", "smoke-007"):
        config = tiny_config(f"run.name={name}")
        (new_run(config) / "config.yaml").write_text(config.to_yaml())
    new_run(tiny_config("run.name=smoke-3"))  # left by a run that failed at once
    (new_run(tiny_config("run.name=smoke-4")) / "config.yaml").write_text("run: [")
    assert str(latest_run(tiny_config())) == "runs/smoke"
    assert str(latest_run(tiny_config("run.name=smoke-007"))) == "runs/smoke-007"
    with pytest.raises(UserError, match="no run runs/smoke-3 to go on with"):
        latest_run(tiny_config("run.name=smoke-3"))


@pytest.mark.parametrize("when", ["evaluation", "save"])
def test_a_signal_in_the_last_step_loses_nothing(tmp_path, run_train, monkeypatch, when):
    """Nor does a kill after it: --resume makes what is missing, once."""
    if when == "evaluation":
        make = train.make_evaluate

        def signalled(*args):
            evaluate = make(*args)

            def run(params, windows, stop=lambda: False):
                if windows is None:
                    os.kill(os.getpid(), signal.SIGTERM)
                return evaluate(params, windows, stop)

            return run

        monkeypatch.setattr(train, "make_evaluate", signalled)
    else:
        save = train.Loop.save

        def saved(loop, state, *rest):
            save(loop, state, *rest)
            if int(state.step) == 6:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(train.Loop, "save", saved)
    code, out, err = run_train()
    assert (code, err) == (143, "")
    assert "stopped by SIGTERM: step 6 is saved in " in out
    folder = tmp_path / "runs" / "smoke"
    assert not (folder / "sample.txt").exists()
    assert (losses(folder)[-1][2] is None) == (when == "evaluation")

    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (folder / "loss.png").unlink()
    code, out, err = run_train(flags=("--resume",))
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("done: runs/smoke, validation loss ")
    assert [step for step, _, _ in losses(folder)] == [1, 2, 3, 4, 5, 6]
    assert losses(folder)[-1][2] > 0
    assert (folder / "sample.txt").exists()
    assert (folder / "loss.png").exists()
    code, out, _ = run_train(flags=("--resume",))
    assert (code, out.startswith("runs/smoke is complete: 6 of 6")) == (0, True)


def test_two_processes_do_not_share_a_run(tmp_path, run_train):
    config = tiny_config()
    folder = tmp_path / "runs" / "smoke"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config.to_yaml())
    with locked(folder):
        code, out, err = run_train(flags=("--resume",))
    assert (code, out) == (2, "")
    assert err == (
        "error: --resume: another process is training in runs/smoke; wait until it ends, or leave "
        "--resume out to start a run of its own\n"
    )


@pytest.mark.parametrize("what", ["config.yaml", "checkpoint", "loss.png", "sample.txt"])
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, run_train, monkeypatch, what):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*args, **kwargs):
        raise full

    if what == "checkpoint":
        monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", fail)
    elif what == "loss.png":
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    else:
        replace = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: fail() if what in str(b) else replace(a, b))
    code, _, err = run_train()
    assert code == 1
    assert err.startswith("error: cannot write ")
    assert what in err
    assert "No space left on device" in err
    assert err.count("\n") == 1
    folder = tmp_path / "runs" / "smoke"
    assert not list(folder.glob("*.part"))
    if what in ("loss.png", "sample.txt"):
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        assert run_train(flags=("--resume",))[0] == 0
        assert (folder / what).exists()


def test_a_model_too_large_for_memory_is_one_line(tmp_path, run_train, monkeypatch):
    def fail(*args):
        raise MemoryError("Unable to allocate 1 EiB")

    monkeypatch.setattr(train, "init_params", fail)
    code, _, err = run_train()
    assert code == 1
    assert err.startswith("error: out of memory: take a smaller model.dim, ")
    assert list(tmp_path.iterdir()) == []


def test_processes_that_do_not_find_each_other(tmp_path, run_train, monkeypatch):
    def fail():
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    code, _, err = run_train("run.distributed=true")
    assert code == 2
    assert err.startswith("error: run.distributed: got true, but the processes do not find")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, run_train):
    (tmp_path / "taken").write_text("a file")
    code, out, err = run_train("run.dir=taken")
    assert (code, out) == (2, "")
    assert err.startswith("error: run.dir: cannot make the folder taken/smoke: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("data.corpus=smaple", "error: data: corpus: got 'smaple', which is no file or folder"),
        ("data.corpus=smaple", "Did you mean 'sample'?"),
        ("training.seq_len=2000", "error: training.seq_len: got 2000, but the validation set has"),
        ("training.seq_len=20000", "error: data: seq_len: got 20000, but the training set has"),
        ("attention.impl=splash", "error: attention.impl: got 'splash', a kernel of jax for TPUs"),
        ("sampling.prompt=☃", "error: sampling.prompt: text: has '☃'"),
        ("attention.mask=full()", "error: attention.mask: in 'full()' query 0 sees key 1"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_is_made(tmp_path, run_train, override, text):
    code, out, err = run_train(override)
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["train_loss", "grad_norm", "param_norm", "val_loss"])
def test_anything_that_is_no_number_stops_the_run(tmp_path, run_train, monkeypatch, wrong):
    """At step 4, after the checkpoint of step 2, by way of the compiled functions."""
    if wrong == "val_loss":
        answers = iter([1.0, math.nan])
        monkeypatch.setattr(train, "make_evaluate", lambda *args: lambda *_: next(answers))
    else:
        make = train.make_train_step

        def spoiled(*args):
            step = make(*args)

            def run(state, *batch):
                number = int(state.step) + 1
                state, measures = step(state, *batch)
                return state, measures | ({wrong: math.inf} if number == 4 else {})

            return run

        monkeypatch.setattr(train, "make_train_step", spoiled)
    code, out, err = run_train()
    assert (code, err) == (1, "")
    value = "nan" if wrong == "val_loss" else "inf"
    assert out.splitlines()[-1].startswith(f"stopped at step 4: {wrong} is {value}; its batch: ")
    folder = tmp_path / "runs" / "smoke"
    assert out.splitlines()[-1].count(f"last good checkpoint: {folder / 'checkpoints' / '2'}. ")
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["2"]
    assert [step for step, _, _ in losses(folder)] == [1, 2, 3]


def test_a_loss_that_is_no_number_stops_the_run(tmp_path, run_train):
    code, out, err = run_train(
        "optimizer.learning_rate=1e38",
        "optimizer.schedule=wsd",
        "optimizer.warmup_fraction=1.0",
        "optimizer.decay_fraction=0.0",
        "training.eval_every=1",
        "checkpoint.every=1",
    )
    assert (code, err) == (1, "")
    stop = out.splitlines()[-1]
    saved = sorted(int(p.name) for p in (tmp_path / "runs/smoke").glob("checkpoints/*"))
    step = len(losses(tmp_path / "runs" / "smoke")) + 1
    assert stop.startswith(f"stopped at step {step}: ")
    assert " is nan" in stop or " is inf" in stop
    assert "; its batch: epoch 0, window " in stop
    assert "(sample + " in stop
    assert " and 3 more rows of seed 0; last good checkpoint: " in stop
    assert (f"runs/smoke/checkpoints/{saved[-1]}" if saved else "none was saved yet") in stop
    text = (tmp_path / "runs/smoke/metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


@pytest.mark.slow
def test_resume_goes_on_as_if_nothing_had_happened(tmp_path, run_train):
    assert run_train("run.name=whole")[0] == 0
    whole = losses(tmp_path / "runs" / "whole")
    assert run_train("run.name=parts", "training.num_iterations=6")[0] == 0
    folder = tmp_path / "runs" / "parts"
    assert losses(folder) == whole
    # As if killed before checkpoint 6 was whole, in the middle of a record.
    (folder / "checkpoints" / "6").rename(tmp_path / "lost")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "tra')
    code, out, err = run_train("run.name=parts", flags=("--resume",))
    assert code == 0, err
    assert out.startswith("run: runs/parts, resumed after step 4\n")
    assert losses(folder) == whole
    code, out, err = run_train("run.name=parts", flags=("--resume",))
    assert code == 0
    assert out == (
        "runs/parts is complete: 6 of 6 steps; set training.num_iterations higher to go on\n"
    )
    code, out, err = run_train("run.name=parts", "training.num_iterations=8", flags=("--resume",))
    assert code == 0
    assert "training.num_iterations: 6 until step 6, 8 from now on" in out
    assert [step for step, _, _ in losses(folder)] == [1, 2, 3, 4, 5, 6, 7, 8]
    code, out, err = run_train("run.name=parts", "model.dim=32", flags=("--resume",))
    assert (code, out) == (2, "")
    assert "does not fit: model.dim is 16 there and 32 in the config" in err


LONG = ("training.num_iterations=60", "training.eval_every=5", "checkpoint.every=5")


def kill_when(process, condition, delay=0.0, timeout=120):
    """SIGKILL once `condition()` holds; False when the process ended before."""
    end = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, "the run did not get that far"
    time.sleep(delay)
    process.kill()
    process.communicate()
    return True


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_nothing(tmp_path):
    """Among them one before the first checkpoint, and some in the middle of writing one."""
    whole = start("train", arguments(*LONG, "run.name=whole"), tmp_path)
    _, err = whole.communicate(timeout=200)
    assert whole.returncode == 0, err

    folder = tmp_path / "runs" / "killed"
    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    moments = random.Random(0)

    def steps_done(count):
        return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= count

    def is_saving():
        return any(".orbax-checkpoint-tmp" in p.name for p in checkpoints.glob("*"))

    kills, in_saves = 0, 0
    for condition in [steps_done(1), is_saving, steps_done(21), is_saving, steps_done(44)]:
        flags = ["--resume"] if folder.exists() else []
        process = start("train", [*arguments(*LONG, "run.name=killed"), *flags], tmp_path)
        delay = 0.0 if condition is is_saving else moments.random() * 0.05
        kills += kill_when(process, condition, delay)
        in_saves += is_saving()
    assert kills >= 4
    assert in_saves >= 1

    last = start("train", [*arguments(*LONG, "run.name=killed"), "--resume"], tmp_path)
    _, err = last.communicate(timeout=200)
    assert last.returncode == 0, err
    assert losses(folder) == losses(tmp_path / "runs" / "whole")
    assert not is_saving()
    sample, whole_sample = (tmp_path / "runs" / n / "sample.txt" for n in ("killed", "whole"))
    assert sample.read_text() == whole_sample.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_saves_and_stops(tmp_path, number, code, name):
    many = ("training.num_iterations=100000", "training.eval_every=50000", "checkpoint.every=50000")
    process = start("train", arguments(*many), tmp_path)
    metrics = tmp_path / "runs" / "smoke" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "")
    (checkpoint,) = (tmp_path / "runs" / "smoke" / "checkpoints").iterdir()
    assert out.splitlines()[-1] == (
        f"stopped by {name}: step {checkpoint.name} is saved in "
        f"{checkpoint}; --resume goes on from there"
    )
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == int(checkpoint.name)


@pytest.mark.slow
def test_the_articles_command(tmp_path):
    """Verbatim, but for where it is run."""
    command = (
        f"--config {SMOKE} --override attention.impl=ours --override attention.preprocess=pallas "
        "--override training.num_iterations=3"
    )
    process = start("train", command.split(), tmp_path)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, "")
    assert "attention.impl=ours: smalti.attention, blockwise on cpu" in out
    assert "attention.preprocess=pallas: smalti's Pallas kernels" in out
    assert [step for step, _, _ in losses(tmp_path / "runs" / "smoke")] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "mask", "sampled"),
    [
        (
            ("attention.impl=streaming", "attention.sink_tokens=2", "attention.window=5"),
            "streaming(sinks=2, window=5)",
            "with a cache of the first 2 and the last 5 tokens, positions by cache",
        ),
        (
            ("attention.impl=flex", "attention.mask=document(lengths=[10, 6]) & causal()"),
            "document(lengths=[10, 6]) & causal()",
            "a forward pass over the last 16 tokens each",
        ),
    ],
    ids=["streaming", "flex"],
)
def test_masks_train_and_write(tmp_path, run_train, overrides, mask, sampled):
    code, out, _ = run_train(*overrides)
    assert code == 0
    assert f"attention.mask: {mask} leaves" in out
    assert sampled in out
    lines = (tmp_path / "runs/smoke/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[-1]["train_loss"] < records[0]["train_loss"]
    assert len((tmp_path / "runs/smoke/sample.txt").read_text()) == len("\n") + 5 + len("\n")


@pytest.mark.slow
def test_ours_and_xla_learn_alike(tmp_path, run_train):
    """The smoke model, each implementation from the same start on the same batches."""
    curves = {}
    for impl in ("xla", "ours"):
        args = ["--config", str(SMOKE), "--override", f"attention.impl={impl}"]
        args += ["--override", f"run.name={impl}", "--override", "sampling.num_tokens=0"]
        assert train.main(args) == 0
        curves[impl] = losses(tmp_path / "runs" / impl)
    for (step, a, _), (_, b, _) in zip(curves["xla"], curves["ours"], strict=True):
        # Rounding grows with the steps, as each starts from the last.
        assert abs(a - b) <= 1e-6 * 2 ** (step / 2) * a
    assert curves["ours"][-1][1] < curves["ours"][0][1] - 1
    assert load_config(SMOKE).attention.impl == "ours"


@pytest.mark.slow
def test_the_kernels_follow_the_loss_of_xla(tmp_path, monkeypatch):
    """The smoke model in interpret mode, step by step, as near as rounding leaves it.

    How far rounding alone takes a run is seen in XLA's own, whose batch is summed in eight parts:
    twice as far is allowed, and the last bit of the loss. One key of 64, missing to one query of
    64, goes beyond that.
    """
    monkeypatch.chdir(tmp_path)

    def run(name, *overrides):
        args = ["--config", str(SMOKE)]
        for override in (*overrides, f"run.name={name}", "sampling.num_tokens=0"):
            args += ["--override", override]
        assert train.main(args) == 0
        records = read_records(tmp_path / "runs" / name / "metrics.jsonl")
        return np.array([r["train_loss"] for r in records])

    xla = run("xla", "attention.impl=xla")
    parts = run("parts", "attention.impl=xla", "training.grad_accumulation=8")
    window = run("window", "attention.impl=xla", "attention.mask=sliding_window(63)")
    kernels = ("attention.impl=ours", "attention.preprocess=pallas", "attention.interpret=true")
    ours = run("ours", *kernels)
    assert len(xla) == 20
    allowed = 2 * np.maximum.accumulate(abs(parts - xla)) + np.spacing(xla.astype(np.float32))
    assert (abs(ours - xla) <= allowed).all(), (ours - xla, allowed)
    assert (abs(window - xla) > allowed).any()
