"""The training step on TPUs that are not here: the arithmetic, the command, a real compile."""

import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass

import pytest
from rich.console import Console

from nanogpt_jax import estimate
from nanogpt_jax.attention import make_attention
from nanogpt_jax.config import UserError

from .conftest import arguments, tiny_config

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)


@dataclass(frozen=True)
class Op:
    """What is read of an operation of a schedule."""

    op_name: str
    cycles: float | None
    kind: str = "xla"
    count: int = 1
    priced_by: str = "compiler"
    opcode: str = "fusion"
    bytes_hbm_read: int = 0
    bytes_hbm_written: int = 0


def test_operations_belong_to_the_part_whose_scope_they_carry():
    parts = estimate.parts_of(
        [
            Op("jit(step)/jvp(attention.impl)/pallas_call", 5.0, "kernel", count=2),
            Op("jit(step)/transpose(jvp(attention.impl))/broadcast_in_dim", 3.0),
            Op("jit(step)/transpose(jvp(attention.preprocess))/mul", 7.0, "copy"),
            Op("state.params['blocks'][0]['attention']['q']", 11.0),
            Op("", 13.0),
            Op("jit(step)/psum", None, "collective"),
        ]
    )
    assert parts == {
        "attention": {"kernels": 10.0, "xla": 3.0},
        "preprocess": {"kernels": 0.0, "xla": 7.0},
        "rest": {"kernels": 0.0, "xla": 24.0},
    }


def test_layers_lie_on_a_straight_line():
    one, three = {"a": 10.0, "b": {"c": 5}}, {"a": 14.0, "b": {"c": 5}}
    assert estimate.at_layers([one, three], [1, 3], 12) == {"a": 32.0, "b": {"c": 5}}
    assert estimate.at_layers([one], [1], 12) == one


@pytest.mark.parametrize(
    ("time", "rows", "beyond"),
    [(10, 4, False), (15, 6, False), (20, 8, False), (40, 12, False), (80, 20, True), (5, 2, True)],
)
def test_rows_for_a_time(time, rows, beyond):
    assert estimate.rows_for(time, [4, 8, 16], [10, 20, 60]) == (rows, beyond)


def test_a_refused_entry_says_why(capsys):
    """Numbers are those of a real step."""
    half = {"attention": {"kernels": 20e6, "xla": 5e6}, "preprocess": {"kernels": 0.0, "xla": 25e6}}
    parts = {**half, "rest": {"kernels": 0.0, "xla": 50e6}}
    good = {
        "impl": "jax_flash",
        "rows": 8,
        "layers": 12,
        "cycles": {"simulation": parts, "compiler": parts},
        "cycles_not_simulated": 3e6,
        "memory": {"peak_bytes": 12.2e9},
        "unpriced": {"collectives": {"count": 4, "bytes": 5e8}, "others": {"count": 0, "bytes": 0}},
        "time_ns": {"simulation": 50e6, "compiler": 90e6},
        "attention_share": {"simulation": 0.25, "compiler": 0.25},
        "fits": False,
    }
    record = {
        "label": "estimate; uncalibrated",
        "topology": "v6e:4x4",
        "devices": 16,
        "clock_hz": 2e9,
        "num_layers": 12,
        "entries": [{"impl": "xla", "rows": 8, "reason": "no memory"}, good],
        "measured": [
            {"impl": "xla", "time_ns": 1e8, "price": "compiler", "rows": 9.26, "beyond": True}
        ],
        "assumptions": ["all is well"],
    }
    estimate.show(record, Console(width=80))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "estimate; uncalibrated"
    assert "xla 8 none" in lines
    assert "jax_flash 8 50.0 90.0 12.5 25% 10.0 2.5 12.5 12.2" in lines
    assert "xla, 8 rows: no memory" in lines
    text = " ".join(lines)
    assert (
        "jax_flash, 8 rows: its peak is more than the HBM; 3% of the step are the compiler's "
        "cycles; 4 collectives (0.50 GB) have no price and add nothing"
    ) in text
    assert (
        "measured 100.00 ms with xla: 9.3 rows a device, by compiler, beyond what was estimated"
    ) in text
    assert lines[-1] == "- all is well"


def entry(impl, rows, ms):
    return {"impl": impl, "rows": rows, "time_ns": dict.fromkeys(estimate.PRICES, ms * 1e6)}


def test_measured_times_are_explained_by_their_own_implementation():
    entries = [entry("xla", 4, 100), entry("jax_flash", 4, 10), entry("xla", 8, 180)]
    entries += [entry("jax_flash", 8, 20), {"impl": "xla", "rows": 16, "reason": "no memory"}]
    found = estimate.explain_measured(entries, {"xla": 140e6, "jax_flash": 40e6})
    assert [(f["impl"], f["price"], f["rows"], f["beyond"]) for f in found] == [
        ("xla", "simulation", 6.0, False),
        ("xla", "compiler", 6.0, False),
        ("jax_flash", "simulation", 16.0, True),
        ("jax_flash", "compiler", 16.0, True),
    ]


def test_one_estimate_explains_nothing():
    entries = [entry("xla", 4, 100), {"impl": "xla", "rows": 8, "reason": "no memory"}]
    with pytest.raises(UserError) as error:
        estimate.explain_measured(entries, {"xla": 140e6})
    assert str(error.value) == (
        "--measured xla: needs estimates at two or more numbers of --rows, which grow with them"
    )


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--chip", "v6"], "--chip: got 'v6'; it is one of v4, v5e, v5p, v6e, v7x"),
        (
            ["--rows", "8,4"],
            "--rows: got '8,4'; write numbers from 1 on, ascending, such as 4,8",
        ),
        (["--layers", "1,2,3"], "--layers: got 3 numbers; it takes at most 2"),
        (["--vocab-size", "0"], "--vocab-size: got 0; it must be at least 1"),
        (
            ["--impl", "flash"],
            "the command line: attention.impl: got 'flash'; allowed are 'xla', 'ours', "
            "'streaming', 'flex', 'jax_flash', 'splash'; did you mean 'jax_flash'?",
        ),
        (
            ["--measured", "ours=100", "--rows", "1,2"],
            "--measured: got 'ours=100'; write one of xla, '=' and milliseconds",
        ),
        (["--measured", "xla=100"], "--measured: needs two or more numbers of --rows to go by"),
        (
            ["--topology", "v6e:4x4"],
            "training.batch_size: got 4 for 16 devices of v6e:4x4; give --rows",
        ),
    ],
)
def test_wrong_input_is_one_line(flags, text, capsys):
    assert estimate.main([*arguments(), *flags]) == 2
    assert capsys.readouterr().err == f"error: {text}\n"


@pytest.mark.parametrize(
    ("impl", "text"),
    [
        (
            "jax_flash",
            "attention.impl=jax_flash: jax.experimental.pallas.ops.tpu.flash_attention, on a TPU",
        ),
        ("ours", "attention.impl=ours: smalti.attention, which chooses on the tpu"),
    ],
)
def test_attention_for_a_platform_that_is_not_here(impl, text):
    config = tiny_config(f"attention.impl={impl}", "attention.preprocess=pallas")
    choice = make_attention(config, platform="tpu")
    assert choice.description[0] == text
    assert "interpret" not in choice.description[2]


def test_without_the_compiler(monkeypatch, capsys):
    version = importlib.metadata.version

    def no_libtpu(name):
        if name == "libtpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", no_libtpu)
    assert estimate.main(arguments()) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: libtpu, the TPU compiler, is not installed: pip install ")


@needs_libtpu
@pytest.mark.slow
def test_a_step_of_both_implementations(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SMALTI_CACHE", str(tmp_path / "cache"))
    args = arguments(
        "model.dim=128", "model.num_heads=1", "training.seq_len=256", "training.dtype=bfloat16"
    )
    path = tmp_path / "step.json"
    flags = ["--topology", "v6e:2x2", "--impl", "xla,jax_flash", "--rows", "2"]
    assert estimate.main([*args, *flags, "--vocab-size", "512", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["devices"] == 4
    assert record["label"].startswith("estimate; ")
    assert record["label"] in " ".join(out.split())
    xla, flash = record["entries"]
    assert (xla["impl"], flash["impl"]) == ("xla", "jax_flash")
    for found in (xla, flash):
        assert found["layers"] == 1
        assert found["fits"] is True
        # The state is on every device: its size, and that of the optimizer's two moments.
        parameters = 2 * 512 * 128 + 4 * 128 * 128 + 8 * 128 * 128
        assert 12 * parameters < found["memory"]["arguments_bytes"] < 14 * parameters
        assert found["memory"]["peak_bytes"] > found["memory"]["arguments_bytes"]
        for price in estimate.PRICES:
            cycles = sum(n for part in found["cycles"][price].values() for n in part.values())
            assert found["time_ns"][price] == pytest.approx(cycles / 1.75)
            assert 0 < found["attention_share"][price] < 1
            assert found["cycles"][price]["preprocess"]["xla"] > 0
            kernels = found["cycles"][price]["attention"]["kernels"]
            assert (kernels > 0) == (found["impl"] == "jax_flash")
        # Gradients are summed over the slice, once each.
        assert found["unpriced"]["collectives"]["bytes"] >= 4 * parameters
        assert "have no price and add nothing" in found["assumptions"][-1]
    assert "collectives" in out
    assert "have no price and add nothing" in " ".join(out.split())
