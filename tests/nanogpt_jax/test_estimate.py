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
from tests.support.libtpu import needs_libtpu

from .conftest import arguments, tiny_config


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
        "preprocess": "xla",
        "rows": 8,
        "layers": 12,
        "cycles": {"simulation": parts, "compiler": parts},
        "cycles_not_simulated": 3e6,
        "busy_cycles": {
            "step": {"MXU": 40e6, "HBM": 45e6},
            "attention_kernels": {"MXU": 14e6, "VALU": 16e6},
        },
        "memory": {"peak_bytes": 12.2e9},
        "unpriced": {"collectives": {"count": 4, "bytes": 5e8}, "others": {"count": 0, "bytes": 0}},
        "time_ns": {"simulation": 50e6, "compiler": 90e6},
        "speed_up": {"simulation": 1.414, "compiler": 1.1},
        "attention_share": {"simulation": 0.25, "compiler": 0.25},
        "fits": False,
    }
    refused = {"impl": "xla", "preprocess": "xla", "rows": 8, "reason": "no memory"}
    explained = {"impl": "xla", "preprocess": "xla", "price": "compiler", "beyond": True}
    record = {
        "label": "estimate; uncalibrated",
        "topology": "v6e:4x4",
        "devices": 16,
        "clock_hz": 2e9,
        "num_layers": 12,
        "entries": [refused, good],
        "measured": [{**explained, "time_ns": 1e8, "rows": 9.26}],
        "assumptions": ["all is well"],
    }
    estimate.show(record, Console(width=80))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "estimate; uncalibrated"
    assert "xla/xla 8 none" in lines
    assert "jax_flash/xla 8 50.0 1.41 90.0 12.5 25% 10.0 12.5 12.2" in lines
    assert "xla/xla, 8 rows: no memory" in lines
    text = " ".join(lines)
    assert (
        "jax_flash/xla, 8 rows: its peak is more than the HBM; busiest: HBM for 45% of the step, "
        "VALU for 80% of attention's kernels; 3% of the step are the compiler's cycles; 4 "
        "collectives (0.50 GB) have no price and add nothing"
    ) in text
    assert (
        "measured 100.00 ms with xla/xla: 9.3 rows a device, by compiler, beyond what was estimated"
    ) in text
    assert lines[-1] == "- all is well"


XLA, OURS = estimate.Variant("xla", "xla"), estimate.Variant("xla", "pallas")


def entry(variant, rows, ms=None):
    """Without ms: refused."""
    known = {"time_ns": dict.fromkeys(estimate.PRICES, ms * 1e6)} if ms else {"reason": "no memory"}
    return {**variant._asdict(), "rows": rows, **known}


def test_measured_times_are_explained_by_their_own_variant():
    entries = [entry(XLA, 4, 100), entry(OURS, 4, 10), entry(XLA, 8, 180)]
    entries += [entry(OURS, 8, 20), entry(XLA, 16)]
    found = estimate.explain_measured(entries, {XLA: 140e6, OURS: 40e6})
    got = [(f["impl"], f["preprocess"], f["price"], f["rows"], f["beyond"]) for f in found]
    assert got == [
        ("xla", "xla", "simulation", 6.0, False),
        ("xla", "xla", "compiler", 6.0, False),
        ("xla", "pallas", "simulation", 16.0, True),
        ("xla", "pallas", "compiler", 16.0, True),
    ]


def test_speed_ups_are_over_the_first_variant_at_the_same_rows():
    entries = [entry(XLA, 8, 90), entry(XLA, 16), entry(OURS, 8, 60), entry(OURS, 16, 100)]
    estimate.add_speed_ups(entries)
    assert [found.get("speed_up") for found in entries] == [
        dict.fromkeys(estimate.PRICES, 1.0),
        None,
        dict.fromkeys(estimate.PRICES, 1.5),
        None,
    ]


def test_one_estimate_explains_nothing():
    entries = [entry(XLA, 4, 100), entry(XLA, 8)]
    with pytest.raises(UserError) as error:
        estimate.explain_measured(entries, {XLA: 140e6})
    assert str(error.value) == (
        "--measured xla/xla: needs estimates at two or more numbers of --rows, which grow with them"
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
            ["--impl", "xla/xla,ours/palas"],
            "the command line: attention.preprocess: got 'palas'; allowed are 'xla', 'pallas'; "
            "did you mean 'pallas'?",
        ),
        (
            ["--measured", "ours=100", "--rows", "1,2"],
            "--measured: got 'ours=100'; write one of xla/xla, '=' and milliseconds",
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
def test_a_step_of_three_implementations(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SMALTI_CACHE", str(tmp_path / "cache"))
    args = arguments(
        "model.dim=128", "model.num_heads=1", "training.seq_len=256", "training.dtype=bfloat16"
    )
    path = tmp_path / "new" / "step.json"
    flags = ["--topology", "v6e:2x2", "--impl", "xla,jax_flash,ours/pallas", "--rows", "2"]
    assert estimate.main([*args, *flags, "--vocab-size", "512", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["devices"] == 4
    assert record["label"].startswith("estimate; ")
    assert record["label"] in " ".join(out.split())
    entries = record["entries"]
    assert [str(estimate.variant_of(found)) for found in entries] == [
        *("xla/xla", "jax_flash/xla", "ours/pallas")
    ]
    for found in entries:
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
            kernels = {part: n["kernels"] for part, n in found["cycles"][price].items()}
            assert (kernels["attention"] > 0) == (found["impl"] != "xla")
            assert (kernels["preprocess"] > 0) == (found["preprocess"] == "pallas")
            ratio = entries[0]["time_ns"][price] / found["time_ns"][price]
            assert found["speed_up"][price] == ratio
        parts, busy = found["cycles"]["simulation"], found["busy_cycles"]
        assert 0 < busy["step"]["MXU"] < sum(n for part in parts.values() for n in part.values())
        assert bool(busy["attention_kernels"]) == (found["impl"] != "xla")
        assert all(n < parts["attention"]["kernels"] for n in busy["attention_kernels"].values())
        # Gradients are summed over the slice, once each.
        assert found["unpriced"]["collectives"]["bytes"] >= 4 * parameters
        assert "have no price and add nothing" in found["assumptions"][-1]
    assert "collectives" in out
    assert "have no price and add nothing" in " ".join(out.split())
