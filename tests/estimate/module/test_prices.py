import pytest

from smalti.estimate.errors import UnknownOperation
from smalti.estimate.module.hlo import read_module
from smalti.estimate.module.prices import Overlap, Price, price
from tests.estimate.module.texts import module

SIZE = 8 * 128 * 4
CYCLES = ', backend_config={"window_config":{"estimated_cycles":"77"}}'
OTHERS = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%plain (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0} parameter(0)
  ROOT %n = f32[8,128]{1,0} negate(%p)
}

%waiting (w: f32[8,128]) -> f32[8,128] {
  %w = f32[8,128]{1,0} parameter(0)
  %g = f32[8,128]{1,0} all-gather(%w), dimensions={0}
  ROOT %d = f32[8,128]{1,0} custom-call(%w, %g), custom_call_target="AsyncCollectiveDone"
}

%reducing (q: f32[8,128]) -> f32[8,128] {
  %q = f32[8,128]{1,0} parameter(0)
  ROOT %r = f32[8,128]{1,0} all-reduce(%q), to_apply=%sum
}

"""


def priced(instruction: str, overlap: Overlap = "none") -> Price:
    entry = f"""\
  %x = f32[8,128]{{1,0}} parameter(0)
  %fast = f32[8,128]{{1,0:S(1)}} parameter(1)
  %i = s32[] constant(3)
  ROOT %op = {instruction}
"""
    read = read_module(module(entry, OTHERS, "x: f32[8,128], fast: f32[8,128]"))
    return price(read, read.entry, read.entry.root, 64.0, overlap)


def test_the_compiler_s_cycles_come_first():
    got = priced("f32[8,128]{1,0} fusion(%x), kind=kLoop, calls=%plain" + CYCLES)
    assert got == Price("xla", "compiler", 77.0, SIZE, SIZE)
    got = priced("f32[8,128]{1,0} fusion(%x), kind=kOutput, calls=%reducing" + CYCLES)
    assert got == Price("xla", "compiler", 77.0, SIZE, SIZE)
    got = priced("f32[8,128]{1,0} copy(%fast)" + CYCLES)
    assert got == Price("copy", "compiler", 77.0, 0, SIZE)


@pytest.mark.parametrize(
    "instruction",
    [
        "(f32[8,128]{1,0}) tuple(%x)",
        "f32[1024]{0} bitcast(%x)",
        "s32[] add(%i, %i)",
        "pred[] compare(%i, %i), direction=LT",
        "s32[]{:S(6)} copy(%i)",
        'f32[8,128]{1,0} custom-call(), custom_call_target="AllocateBuffer"',
        'f32[8,128]{1,0} custom-call(%x), custom_call_target="ConcatBitcast"',
    ],
)
def test_what_is_free(instruction):
    assert priced(instruction) == Price("free", "free", 0.0, 0, 0)


def test_a_kernel_waits_for_its_simulation():
    got = priced('f32[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"')
    assert got == Price("kernel", "simulation", None, None, None)


@pytest.mark.parametrize(
    ("instruction", "read", "written", "cycles"),
    [
        ("f32[8,128]{1,0:S(1)} copy(%x)", SIZE, 0, SIZE / 64),
        ("f32[8,128]{0,1} copy(%x)", SIZE, SIZE, 2 * SIZE / 64),  # both share the bandwidth
        ("f32[8,128]{1,0:S(1)} copy(%fast)", 0, 0, SIZE / 64),
        ("f32[1,128]{1,0} dynamic-slice(%x, %i, %i)", SIZE // 8, SIZE // 8, SIZE / 256),
    ],
)
def test_copies_without_cycles_take_the_bandwidth(instruction, read, written, cycles):
    assert priced(instruction) == Price("copy", "bandwidth", cycles, read, written)
    assert priced(instruction, "full").cycles == cycles  # these stand in the way of the rest


STARTS = [
    (
        "(f32[8,128]{1,0:S(1)}, f32[8,128]{1,0}, u32[]{:S(2)}) copy-start(%x)",
        Price("copy", "bandwidth", SIZE / 64, SIZE, 0),
    ),
    (
        "(f32[8,128]{1,0}, f32[8,128]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%fast)",
        Price("copy", "bandwidth", SIZE / 64, 0, SIZE),
    ),
    (
        "((f32[8,128]{1,0}), f32[2,128]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:2]}",
        Price("copy", "bandwidth", SIZE / 256, SIZE // 4, 0),
    ),
]


@pytest.mark.parametrize(("instruction", "expected"), STARTS)
def test_asynchronous_copies(instruction, expected):
    assert priced(instruction) == expected
    full = priced(instruction, "full")
    assert full.cycles == 0
    assert (full.bytes_hbm_read, full.bytes_hbm_written) == (
        expected.bytes_hbm_read,
        expected.bytes_hbm_written,
    )


def test_a_wait_is_free():
    assert priced("f32[8,128]{1,0} copy-done(%x)") == Price("copy", "free", 0.0, 0, 0)
    assert priced("f32[8,128]{1,0} all-gather-done(%x)").kind == "collective"
    fusion = priced("f32[8,128]{1,0} fusion(%x), kind=kCustom, calls=%waiting")
    assert fusion == Price("collective", "free", 0.0, 0, 0)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        (
            "f32[8,128]{1,0} all-reduce(%fast), to_apply=%sum",
            Price("collective", "nobody", None, 0, SIZE, SIZE),
        ),
        (
            "f32[32,128]{1,0:S(1)} all-gather(%x), dimensions={0}",
            Price("collective", "nobody", None, SIZE, 0, 4 * SIZE),
        ),
        (
            "(f32[8,128]{1,0}, f32[32,128]{1,0}) all-gather-start(%x), dimensions={0}",
            Price("collective", "nobody", None, SIZE, 4 * SIZE, 4 * SIZE),
        ),
        (
            "f32[8,128]{1,0} all-reduce-start(%x), to_apply=%sum",
            Price("collective", "nobody", None, SIZE, SIZE, SIZE),
        ),
        (
            "f32[8,128]{1,0} fusion(%x), kind=kCustom, calls=%reducing",
            Price("collective", "nobody", None, SIZE, SIZE, SIZE),
        ),
        (
            "f32[8,128]{1,0} fusion(%x), kind=kCustom, calls=%plain",
            Price("xla", "nobody", None, SIZE, SIZE, SIZE),
        ),
        (
            "f32[8,128]{1,0:S(1)} sort(%fast), dimensions={0}, to_apply=%sum",
            Price("xla", "nobody", None, 0, 0, SIZE),
        ),
        (
            'f32[8,128]{1,0} custom-call(%x), custom_call_target="Cholesky"',
            Price("xla", "nobody", None, SIZE, SIZE, SIZE),
        ),
        (
            "(f32[8,128]{1,0:S(5)}, f32[8,128]{1,0}, u32[]{:S(2)}) copy-start(%x)",
            Price("copy", "nobody", None, 0, 0, SIZE),  # to the host: no HBM bandwidth
        ),
    ],
)
def test_what_nobody_prices(instruction, expected):
    assert priced(instruction) == expected


@pytest.mark.parametrize(
    ("instruction", "what"),
    [
        ("f32[8,128]{1,0} fusion(%x), kind=kLoop, calls=%plain", "a fusion of f32"),
        ("f32[8,128]{1,0} add(%x, %x)", "an add of f32|a add of f32"),
        ("(f32[8,128]{1,0}) frobnicate(%x)", "a frobnicate of a tuple"),
    ],
)
def test_an_operation_that_no_rule_covers(instruction, what):
    with pytest.raises(UnknownOperation) as error:
        priced(instruction)
    assert str(error.value).startswith("%op, line ")
    assert any(text in str(error.value) for text in what.split("|"))
    assert "without estimated_cycles" in str(error.value)


@pytest.mark.parametrize("opcode", ["frobnicate-start", "frobnicate-done", "async-start"])
def test_an_asynchronous_operation_that_is_not_known(opcode):
    with pytest.raises(UnknownOperation, match=f"asynchronous operation {opcode} is not known"):
        priced(f"f32[8,128]{{1,0}} {opcode}(%x)")
