import math

import pytest

from smalti.chips import CHIPS, TENSOR_CORES
from smalti.cli.bench_cases import OURS, Asked, tasks
from smalti.cli.bench_record import floor, record_of, summary
from smalti.estimate.peers import AttentionCase
from smalti.estimate.tune import Trial
from tests.support.tokamax import needs_tokamax

ASKED = Asked(("v6e",), (128,), (4096,), (8,), ("forward",))


def trial(cycles: float, **others) -> Trial:
    return Trial(
        cycles=cycles,
        time_ns=cycles / 1.75,
        bytes_hbm=1,
        bound="MXU",
        kernels_time_ns=cycles / 2,
        **others,
    )


def row(ratio, *, chip="v6e", which="forward", length=4096):
    return {
        "chip": chip,
        "pass": which,
        "D": 128,
        "S": length,
        "Hkv": 8,
        "best_peer": "splash",
        "ratio": ratio,
        "kernels_ratio": ratio,
        "floor_over_ours": ratio and 0.5,
    }


def first_row(trials):
    return record_of(ASKED, trials, {})["rows"][0]


@needs_tokamax
def test_the_best_of_each_peer_and_the_best_peer():
    peers = [task.variant.peer for task in tasks(ASKED)]
    cycles = {OURS: 60.0, "tokamax": 100.0, "splash": 90.0, "jax_flash": 200.0}
    trials = {}
    for place, peer in enumerate(peers):
        first = peers.index(peer) == place
        trials[place] = trial(cycles[peer] + (0 if first else 5))
    found = first_row(trials)
    assert found["best_peer"] == "splash"
    assert found["ratio"] == pytest.approx(60 / 90)
    assert found["kernels_ratio"] == pytest.approx(60 / 90)
    assert {name: one["cycles"] for name, one in found["peers"].items()} == {
        name: cycles[name] for name in ("tokamax", "splash", "jax_flash")
    }
    assert found["peers"]["splash"]["blocks"] == found["tried"]["splash"][0]["blocks"]
    assert found["floor_over_ours"] == pytest.approx(found["floor"]["time_ns"] / (60 / 1.75))
    assert found["reasons"] == {}
    assert sum(map(len, found["tried"].values())) == len(peers)


@needs_tokamax
def test_a_reason_is_kept_where_there_is_no_estimate():
    trials = {place: Trial(reason="it does not fit") for place in range(len(tasks(ASKED)))}
    del trials[0]
    found = first_row(trials)
    assert found["reasons"].pop(OURS) == "not compiled yet"
    assert set(found["reasons"].values()) == {"it does not fit"}
    assert found["best_peer"] is found["ratio"] is found["ours"] is None


def test_geometric_means_the_worst_shape_and_the_bars():
    rows = [row(0.5), row(0.98, length=2048), row(0.9, chip="v5e"), row(0.5, which="both")]
    by = {(one["pass"], one["chip"]): one for one in summary(rows)}
    assert list(by) == [("forward", "v6e"), ("forward", "v5e"), ("forward", "all"), ("both", "v6e")]
    v6e = by["forward", "v6e"]
    assert v6e["ratio"] == pytest.approx(math.sqrt(0.49))
    keys = ("chip", "D", "S", "Hkv", "ratio", "best_peer")
    assert v6e["worst"] == {key: rows[1][key] for key in keys}
    assert v6e["met"] is True
    assert by["forward", "v5e"]["met"] is False
    assert by["forward", "all"]["ratio"] == pytest.approx((0.49 * 0.9) ** (1 / 3))
    assert by["both", "v6e"]["bar"] == 0.80
    assert {one["worst_met"] for one in by.values()} == {True}


def test_slower_than_the_best_peer_anywhere_misses_its_bar():
    (one,) = summary([row(0.3), row(1.01)])
    assert one["met"] is True
    assert one["worst_met"] is False


def test_a_bar_is_open_while_a_shape_is_not_compared():
    (one,) = summary([row(0.3), row(None)])
    assert (one["compared"], one["shapes"]) == (1, 2)
    assert one["ratio"] == pytest.approx(0.3)
    assert one["met"] is one["worst_met"] is None
    (none,) = summary([row(None)])
    assert none["ratio"] is none["worst"] is none["met"] is None


def test_the_floor_of_a_known_shape():
    """4,096 queries, 8 heads on v6e: 37 µs for the EUP, and as much for FLOPs at the peak rate."""
    found = floor(AttentionCase.parse("B=1,Hq=8,Hkv=8,S=4096,D=128"), "forward", "v6e")
    pairs = 8 * 4096 * 4097 / 2
    assert found["eup_time_ns"] == pytest.approx(pairs / 1024 / 1.75)
    peak = {chip.name: chip.bf16_flops_per_s for chip in CHIPS}["TPU v6e"]
    assert found["mxu_peak_time_ns"] == pytest.approx(pairs * 4 * 128 / peak * 1e9, rel=0.01)
    # QKᵀ contracts 128 of the array's 256 rows.
    assert found["mxu_time_ns"] == pytest.approx(1.5 * found["mxu_peak_time_ns"])
    assert (found["unit"], found["time_ns"]) == ("MXU", found["mxu_time_ns"])


@pytest.mark.parametrize(("chip", "dim", "fed"), [("v5e", 128, 128), ("v5e", 64, 128)])
def test_the_floor_with_a_backward(chip, dim, fed):
    case = AttentionCase.parse(f"B=1,Hq=8,Hkv=2,S=2048,D={dim}")
    found, alone = floor(case, "both", chip), floor(case, "forward", chip)
    assert found["eup_time_ns"] == pytest.approx(2 * alone["eup_time_ns"])
    products = (3 * fed + 4 * dim) / (fed + dim)
    assert found["mxu_time_ns"] == pytest.approx(products * alone["mxu_time_ns"])


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
def test_mxus_times_their_sides_make_the_peak(chip):
    """Not on v7x, whose peak rate implies another clock than libtpu's."""
    core = TENSOR_CORES[chip]
    (peak,) = (c.bf16_flops_per_s for c in CHIPS if c.name == f"TPU {chip}")
    cores = {"v4": 2, "v5p": 2}.get(chip, 1)
    rate = 2 * core.mxus * core.mxu_rows_per_cycle * core.mxu_side**2 * core.clock_hz * cores
    assert rate == pytest.approx(peak, rel=0.01)
