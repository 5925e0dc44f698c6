import re
from pathlib import Path

import pytest

from smalti.estimate.compile.dumps import find_kernels
from smalti.estimate.errors import DumpUnreadable
from smalti.estimate.program import KernelDump

CALL = 'custom-call({}), custom_call_target="tpu_custom_call", backend_config={{"body":"{}"}}'


def module(*lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_f\n\n{before}ENTRY %main.1 (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def kernel(op: str, operands: str = "f32[8]{0}", body: str = "A") -> str:
    return f"%{op} = f32[8]{{0:T(256)}} {CALL.format(operands, body)}"


def dump(folder: Path, op: str, time: int = 17959, text: str = "") -> KernelDump:
    made = KernelDump(op, f"bundles of {text or op}", f"utilization of {text or op}")
    (folder / f"{time}-{op}-03-final_bundles.txt").write_text(made.bundles)
    (folder / f"{time}-{op}-02-schedule-analysis_final_bundles.txt").write_text("not this")
    (folder / f"{time}-{op}-01-final_hlo-static-per-bundle-utilization.txt").write_text(
        made.utilization
    )
    return made


def test_kernels_alone_are_found_by_name(tmp_path):
    dumps = {op: dump(tmp_path, op) for op in ("k.1", "k.11", "a_.b-c.3", "copy.2", "TLP")}
    text = module(kernel("k.1"), "%copy.2 = f32[8]{0} copy(f32[8]{0})", f"ROOT {kernel('k.11')}")
    other = module(kernel("a_.b-c.3"), before=text)
    assert find_kernels(text, tmp_path) == {op: dumps[op] for op in ("k.1", "k.11")}
    assert find_kernels(other, tmp_path) == {op: dumps[op] for op in ("k.1", "k.11", "a_.b-c.3")}


def test_a_kernel_that_was_compiled_once_for_two_calls_has_the_dump_of_its_like(tmp_path):
    made = dump(tmp_path, "k.1")
    found = find_kernels(module(kernel("k.1"), kernel("k.2")), tmp_path)
    assert found == {"k.1": made, "k.2": KernelDump("k.2", made.bundles, made.utilization)}


@pytest.mark.parametrize("unlike", [{"operands": "f32[8]{0:S(1)}"}, {"body": "B"}])
def test_a_kernel_unlike_all_that_were_dumped_is_an_error(tmp_path, unlike):
    dump(tmp_path, "k.1")
    text = (
        "the compiler dumped no schedule of k.2, nor of a kernel like it; this version of libtpu "
        "may write its dumps otherwise than the tested ones"
    )
    with pytest.raises(DumpUnreadable, match=f"^{re.escape(text)}$"):
        find_kernels(module(kernel("k.1"), kernel("k.2", **unlike)), tmp_path)


def test_a_kernel_with_its_inputs_fused_in_is_the_fusion(tmp_path):
    def fusion(n: int) -> str:
        return f"%k.{n} = f32[8]{{0}} fusion(f32[8]{{0}}), kind=kCustom, calls=%fused.{n}"

    def fused(n: int, function: str = "sine") -> str:
        return (
            f"%fused.{n} (p: f32[8]) -> f32[8] {{\n  %s.{n} = f32[8]{{0}} {function}(f32[8]{{0}})\n"
            f"  ROOT {kernel(f'inner.{n}')}\n}}\n\n"
        )

    made = dump(tmp_path, "k.5")
    text = module(fusion(5), fusion(6), before=fused(5) + fused(6))
    assert find_kernels(text, tmp_path) == {
        "k.5": made,
        "k.6": KernelDump("k.6", made.bundles, made.utilization),
    }
    with pytest.raises(DumpUnreadable, match=r"no schedule of k\.6"):
        find_kernels(module(fusion(5), fusion(6), before=fused(5) + fused(6, "cosine")), tmp_path)


def test_a_long_name_is_cut_in_its_dump(tmp_path):
    made = dump(tmp_path, "k" * 180 + "-12525603520621954432")
    op = "k" * 300 + ".1"
    assert find_kernels(module(kernel(op)), tmp_path) == {
        op: KernelDump(op, made.bundles, made.utilization)
    }


def test_two_dumps_that_differ_are_an_error(tmp_path):
    dump(tmp_path, "k.1")
    dump(tmp_path, "k.1", time=17960)
    assert find_kernels(module(kernel("k.1")), tmp_path).keys() == {"k.1"}
    dump(tmp_path, "k.1", time=17961, text="something else")
    with pytest.raises(DumpUnreadable, match=r"^the compiler dumped k\.1 3 times with different"):
        find_kernels(module(kernel("k.1")), tmp_path)


@pytest.mark.parametrize(
    ("kind", "named"),
    [("final_bundles", "bundles"), ("final_hlo-static-per-bundle-utilization", "utilization")],
)
def test_an_empty_or_missing_file_is_an_error(tmp_path, kind, named):
    dump(tmp_path, "k.1")
    (path,) = tmp_path.glob(f"*-0[13]-{kind}.txt")
    text = rf"^the compiler's dump of k\.1 is incomplete: its {named} are missing; is the disk full"
    path.write_text("")
    with pytest.raises(DumpUnreadable, match=text):
        find_kernels(module(kernel("k.1")), tmp_path)
    path.unlink()
    with pytest.raises(DumpUnreadable, match=text):
        find_kernels(module(kernel("k.1")), tmp_path)
