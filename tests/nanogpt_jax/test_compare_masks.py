"""The same model under several masks: what is trained, timed and made of it."""

import json
import math

import pytest

from nanogpt_jax import compare_masks, train
from nanogpt_jax.compare import main
from nanogpt_jax.compare_masks import default_arms, mean_curve, reached, summarise, table
from nanogpt_jax.config import load_config
from smalti.chips import TENSOR_CORES

from .conftest import SMOKE, arguments

FEW = ("--rounds", "2", "--seeds", "0,1", "--masks", "dense=causal()", "near=sliding_window(4)")


def command(tmp_path, *more: str) -> list[str]:
    return [*arguments(f"run.dir={tmp_path / 'runs'}"), *FEW, *more]


@pytest.mark.slow
def test_runs_that_are_there_are_not_trained_again(tmp_path, capsys, monkeypatch):
    assert main(command(tmp_path, "--chip", "none")) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "smoke"
    names = {f"{arm}.seed{seed}" for arm in ("dense", "near") for seed in (0, 1)}
    assert {path.name for path in folder.iterdir() if path.is_dir()} == names
    record = json.loads((folder / "comparison.json").read_text())
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    dense, near = record["arms"]
    assert dense["visible_of_causal"] == 1
    assert near["visible_pairs"] == 4 * 16 - 6
    for arm in (dense, near):
        assert len(arm["step_samples_s"]) == 2
        assert set(arm["val_losses"]) == {"0", "1"}
        for seed, losses in arm["val_losses"].items():
            metrics = folder / f"{arm['name']}.seed{seed}" / "metrics.jsonl"
            written = [json.loads(line) for line in metrics.read_text().splitlines()]
            assert losses == {str(r["step"]): r["val_loss"] for r in written if r["val_loss"]}
    assert dense["val_losses"]["0"] != near["val_losses"]["0"] != near["val_losses"]["1"]
    assert "validation loss" in out
    assert "near" in out

    def no_training(*_, **__):
        raise AssertionError("it was trained again")

    monkeypatch.setattr(train, "run_safely", no_training)
    assert main(command(tmp_path, "--chip", "none")) == 0
    assert json.loads((folder / "comparison.json").read_text())["arms"][0]["mask"] == "causal()"
    # Nor is a run of another config taken for one of these.
    assert main(command(tmp_path, "--chip", "none", "--override", "model.dim=32")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "was trained with model.dim=16, not 32" in error
    assert "--override run.name" in error


@pytest.mark.slow
def test_a_training_that_stops_is_gone_on_with(tmp_path, capsys, monkeypatch):
    calls, run_safely = [], train.run_safely

    def stopped_once(config, resume):
        calls.append((config.run.name, resume))
        if len(calls) == 2:
            folder = tmp_path / "runs" / "smoke" / config.run.name
            folder.mkdir()
            (folder / "config.yaml").write_text(config.to_yaml())
            return 130
        return run_safely(config, resume)

    monkeypatch.setattr(train, "run_safely", stopped_once)
    assert main(command(tmp_path, "--chip", "none")) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert main(command(tmp_path, "--chip", "none")) == 0
    expected = [("dense.seed0", False), ("near.seed0", False), ("near.seed0", True)]
    assert calls == [*expected, ("dense.seed1", False), ("near.seed1", False)]


def test_default_masks_are_those_of_the_config_file():
    """Which are trained under in docs/training.md."""
    assert [arm.mask for arm in default_arms(2048)] == [
        "causal()",
        "sliding_window(256)",
        "streaming(sinks=4, window=256)",
        "document(lengths=[512, 512, 512, 512]) & causal()",
    ]
    config = load_config(SMOKE.parent / "masks.yaml")
    assert config.training.seq_len == 2048
    for S in (1, 2, 9, 1025):  # whatever the length, they are masks of it
        own = load_config(SMOKE, [f"training.seq_len={S}"])
        compare_masks.plan_runs(own, default_arms(S), [0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seeds", "0,0"), "--seeds: got 0 twice; each is trained once"),
        (("--seeds", "a"), "--seeds: got 'a'; write whole numbers, as in 0,1,2"),
        (("--seeds", "-1"), "run.seed: got -1"),
        (("--rounds", "0"), "--rounds: got 0; it must be at least 1"),
        (("--chip", "v6"), "--chip: got 'v6'; it is one of v4, v5e, v5p, v6e, v7x, none"),
        (("--masks", "causal()"), "--masks: got 'causal()'; write a name of letters and digits"),
        (("--masks", "a=causal()", "a=full()"), "--masks: got 'a' twice"),
        (("--masks", "a=full()"), "query 0 sees key 1, which comes later"),
        (("--masks", "a=casual()"), "did you mean 'causal'"),
    ],
)
def test_what_is_refused_before_anything_is_trained(tmp_path, capsys, options, message):
    assert main([*arguments(f"run.dir={tmp_path}"), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not list(tmp_path.iterdir())


def test_either_runs_or_a_config(capsys):
    for given in ([], ["runs/a"], ["runs/a", "runs/b", "--config", "x.yaml"]):
        with pytest.raises(SystemExit) as stopped:
            main(given)
        assert stopped.value.code == 2
        assert "give two folders of runs, or --config and no folder" in capsys.readouterr().err


def record(**seeds_of_arms) -> dict:
    """Of arms with losses by seed and step, steps of 1 s and 2 s, one estimated."""
    arms = [
        {
            "name": name,
            "mask": "causal()",
            "visible_pairs": 1,
            "visible_of_causal": 1.0,
            "val_losses": dict(enumerate(seeds)),
            "step_samples_s": [2.0 - n, 9.0, 2.0 - n],
            "estimate": {"time_ns": 4e6, "attention_ns": 1e6} if n else {"reason": "no compiler"},
        }
        for n, (name, seeds) in enumerate(seeds_of_arms.items())
    ]
    return {"chip": "v6e", "config": {"training": {"num_iterations": 30}}, "arms": arms}


def test_what_is_made_of_the_losses():
    made = record(
        dense=[{10: 3.0, 20: 2.0, 30: 1.5}, {10: 3.2, 20: 2.2, 30: 1.7}],
        near=[{10: 2.0, 20: 1.0, 30: 1.6}, {10: 2.2, 20: 1.2, 30: 2.0}],
    )
    dense, near = summarise(made)
    assert dense["loss"] == pytest.approx(1.6)
    assert dense["sd"] == pytest.approx(math.sqrt(0.02))
    assert (dense["paired"], dense["paired_sd"]) == (0, 0)
    assert near["paired"] == pytest.approx(0.2), "of the same seed: 0.1 and 0.3"
    assert near["paired_sd"] == pytest.approx(math.sqrt(0.02))
    assert (dense["step_s"], near["step_s"]) == (2.0, 1.0)
    assert (dense["step_ns"], near["step_ns"]) == (None, 4e6)
    # The worst at step 20 is dense's 2.1, which the other has at step 10 exactly.
    assert dense["target"] == pytest.approx(2.1)
    assert (dense["to_target"], near["to_target"]) == (20, 10)
    lines = "\n".join(table(made))
    assert "1.8000 ± 0.2828" in lines
    assert "no estimate: no compiler" in lines
    assert "10 steps, 10 s, 40 ms of v6e" in lines


def test_one_seed_has_no_spread():
    (row,) = summarise(record(dense=[{10: 3.0, 30: 1.5}]))
    assert row["sd"] is None
    assert "±" not in table(record(dense=[{10: 3.0, 30: 1.5}]))[4]


def test_one_validation_alone_gives_no_curve():
    made = record(dense=[{30: 1.5}], near=[{30: 1.6}])
    assert [row["to_target"] for row in summarise(made)] == [None, None]
    assert "until" not in "\n".join(table(made))


def test_a_curve_comes_down_between_evaluations():
    curve = mean_curve({0: {10: 4.0, 20: 2.0, 30: 0.0}, 1: {10: 4.0, 20: 2.0, 30: 0.0}}, last=30)
    assert curve == {10: 4.0, 20: 2.0}
    assert reached(curve, 3.0) == 15
    assert reached(curve, 4.5) == 10
    assert reached(curve, 1.0) is None


def test_the_estimate_is_of_all_rows_of_a_step(monkeypatch):
    """Also of a step that takes them in parts."""
    asked = []

    def estimate_steps(config, variants, rows, *_):
        asked.append((rows, config.training.dtype, config.attention.preprocess, str(*variants)))
        parts = {"attention": {"kernels": 30.0, "xla": 10.0}, "rest": {"kernels": 0.0, "xla": 60.0}}
        return [{"time_ns": {"simulation": 5.0}, "cycles": {"simulation": parts}}]

    monkeypatch.setattr(compare_masks, "estimate_steps", estimate_steps)
    overrides = ["training.batch_size=8", "training.grad_accumulation=2"]
    (run,) = compare_masks.plan_runs(load_config(SMOKE, overrides), default_arms(64)[:1], [0])
    found = compare_masks.estimate_step(run.config, 55, "v6e")
    assert asked == [([8], "bfloat16", "pallas", "flex/pallas")]
    assert found["time_ns"] == 5.0
    assert found["attention_ns"] == 40 / TENSOR_CORES["v6e"].clock_hz * 1e9
