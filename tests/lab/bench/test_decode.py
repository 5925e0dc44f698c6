import json

import jax.numpy as jnp
import pytest
from rich.console import Console

import smalti
from smalti.lab.bench import __main__ as bench
from smalti.lab.bench import decode
from smalti.lab.bench.decode import EARLY, LATE, RECOMPUTED, DecodeCase, measure_decode


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(decode, "PAUSE_S", 0.0)


TINY = DecodeCase(S=32, late=100, steps=2)


def test_every_sample_is_kept():
    found = measure_decode(TINY, rounds=2)
    assert list(found.timings) == [EARLY, LATE, RECOMPUTED]
    assert all(len(timing.samples_s) == 6 for timing in found.timings.values())
    assert found.ratio(EARLY) == 1.0


def test_what_is_asked_is_printed(capsys):
    found = measure_decode(TINY, rounds=1)
    found.timings[EARLY].samples_s = [1.0]
    found.timings[LATE].samples_s = [1.2]
    found.timings[RECOMPUTED].samples_s = [51.0]
    decode.print_decode(Console(width=120), found)
    printed = capsys.readouterr().out
    assert "within 10% missed" in printed
    assert "≥ 50× met" in printed


def test_decoding_that_computes_something_else_is_an_error(monkeypatch):
    real = smalti.decode.attend

    def wrong(q, cache, k, v):
        out, cache = real(q, cache, k, v)
        return jnp.zeros_like(out), cache

    monkeypatch.setattr(smalti.decode, "attend", wrong)
    with pytest.raises(AssertionError, match=r"decode/f32/32: decoding differs from attention by"):
        measure_decode(TINY, rounds=1)


def test_the_command_writes_it(tmp_path, capsys):
    path = tmp_path / "record.json"
    options = ["--quick", "--rounds", "1", "--only", "decode", "--json", str(path)]
    assert bench.main(options) == 0
    assert "decoding at 2,500" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["results"] == []
    assert record["decode"]["name"] == "decode/f32/256"
    assert record["decode"]["case"]["least_ratio"] is None
