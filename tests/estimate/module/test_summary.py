import re

import pytest

from smalti.estimate.errors import EstimateError
from smalti.estimate.module import ASSUMPTIONS, Overlap, read_module, schedule, summarize
from tests.estimate.module.texts import fixture

MB = 2**20


def summed(name: str, overlap: Overlap = "full", **stated):
    text = fixture(name)
    return summarize(schedule(read_module(text), bytes_per_cycle=1024.0, overlap=overlap, **stated))


def test_a_scan_of_100_takes_ten_times_one_of_10():
    ten, hundred = summed("scan_10"), summed("scan_100")
    # Per pass: a product by the compiler, a copy by the compiler, an update of one element.
    assert ten.cycles_by_kind["xla"] == 10 * 1536
    assert hundred.cycles_by_kind["xla"] == 100 * 1536
    update = 512 / 1024
    assert ten.cycles == pytest.approx(10 * (1536 + 3364 + update))
    assert hundred.cycles == pytest.approx(100 * (1536 + 3364 + update))
    assert ten.cycles_not_from_the_compiler == 10 * update
    assert ten.unpriced == ()


def test_both_versions_of_jax_read_alike():
    old, new = summed("scan_10"), summed("scan_10_jax_0_12")
    assert old.cycles_by_kind["xla"] == new.cycles_by_kind["xla"]
    assert summed("all_reduce_4x4_jax_0_12").unpriced == summed("all_reduce_4x4").unpriced


def test_overlap_is_said_and_counts():
    none, full = summed("dot", "none"), summed("dot", "full")
    # One operand is fetched to VMEM ahead.
    assert none.cycles - full.cycles == 32 * MB / 1024
    assert full.cycles_by_kind == {"xla": 301616.0}
    assert ASSUMPTIONS["none"] in none.assumptions
    assert ASSUMPTIONS["full"] in full.assumptions
    assert (full.bytes_hbm_read, full.bytes_hbm_written) == (64 * MB, 32 * MB)


def test_collectives_have_no_price_and_the_sum_says_so():
    got = summed("collectives")
    assert [(u.name, u.opcode, u.bytes_moved // MB) for u in got.unpriced] == [
        ("all_gather.3", "all-gather", 8),
        ("collective-permute-start", "collective-permute-start", 4),
        ("all_to_all.15", "all-to-all", 4),
        ("psum.7", "all-reduce", 4),
        ("reduce_scatter.7", "reduce-scatter", 4),
    ]
    assert got.unpriced[0].op_name == "jit(f)/shard_map/all_gather"
    assert got.assumptions[-1] == (
        "5 collectives have no price and add nothing, so the sum is a lower bound"
    )


def test_a_kernel_without_its_simulation_is_no_sum():
    text = fixture("kernel_in_scan")
    listed = schedule(read_module(text), bytes_per_cycle=1024.0, overlap="full")
    with pytest.raises(EstimateError, match=r"the kernels closed_call\.4 have no cycles yet"):
        summarize(listed)
    got = summarize(listed.with_kernel("closed_call.4", 1000.0, 3, 5))
    assert got.cycles_by_kind["kernel"] == 6000
    assert got.bytes_hbm_read >= 18
    assert not got.unpriced


def test_what_the_caller_stated_is_said():
    got = summed("cond", branches={"cond.3.clone": 1})
    assert "stated by the caller: %cond.3.clone takes branch 1" in got.assumptions
    assert got.cycles == 5056


def cycles_in(text: str, computation: str) -> int:
    """The compiler's cycles of one computation, added up without the parser; copies apart."""
    body = re.search(rf"^{re.escape(computation)} \(.*?^}}$", text, re.MULTILINE | re.DOTALL)
    assert body
    lines = [line for line in body[0].split("\n") if " copy(" not in line]
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', "\n".join(lines))))


def test_a_training_step_of_four_layers():
    text = fixture("training_step_4x4")
    bodies = re.findall(r" while\(.*body=(%[\w.]+)", text)
    assert len(bodies) == 2  # forward and backward
    once = cycles_in(text, "ENTRY %main.18_spmd")
    a_layer = [cycles_in(text, body) for body in bodies]
    assert min(a_layer) > 0
    got = summed("training_step_4x4")
    assert got.cycles_by_kind["xla"] == once + 4 * sum(a_layer)
    assert {u.opcode for u in got.unpriced} == {"all-reduce", "fusion", "reshape"}
    gradients = [u for u in got.unpriced if u.name == "all-reduce.10"]
    assert [u.count for u in gradients] == [4]  # once a layer
    assert "a loop's own overhead" in " ".join(got.assumptions)


def test_the_sparsecore_runs_beside_and_has_no_price():
    got = summed("sparsecore_gather_jax_0_12")
    assert [(u.name, u.op_name.rpartition("/")[2]) for u in got.unpriced] == [
        ("gather_offload_custom_fusion.3", "gather"),
        ("reshape.20", "gather"),
    ]
    assert (
        "what the sparsecore does runs beside the TensorCore, without a price, and is never "
        "waited for"
    ) in got.assumptions


def test_no_time_is_below_what_hbm_needs():
    """A copy beside nothing, and one beside an operation that is quicker."""
    text = (
        "HloModule m, is_scheduled=true, entry_computation_layout={()->()}\n\n"
        "%f (p: f32[8,128]) -> f32[8,128] {\n"
        "  %p = f32[8,128]{1,0:S(1)} parameter(0)\n"
        "  ROOT %n = f32[8,128]{1,0:S(1)} negate(%p)\n}\n\n"
        "ENTRY %main (x: f32[1024,1024]) -> f32[1024,1024] {\n"
        "  %x = f32[1024,1024]{1,0} parameter(0)\n"
        "  %c = f32[8,128]{1,0:S(1)} constant({...})\n"
        "  %start = (f32[1024,1024]{1,0:S(1)}, f32[1024,1024]{1,0}, u32[]{:S(2)}) copy-start(%x)\n"
        "  %f.1 = f32[8,128]{1,0:S(1)} fusion(%c), kind=kLoop, calls=%f, "
        'backend_config={"window_config":{"estimated_cycles":"1000"}}\n'
        "  ROOT %done = f32[1024,1024]{1,0:S(1)} copy-done(%start)\n}\n"
    )
    listed = schedule(read_module(text), bytes_per_cycle=1024.0, overlap="full")
    found = summarize(listed)
    assert found.cycles == 4 * MB / 1024
    assert found.cycles_by_kind == {"xla": 1000.0, "copy": 4 * MB / 1024 - 1000}
    assert "HBM is busy for 3,096 cycles more than all operations together" in " ".join(
        found.assumptions
    )
