import pytest

from smalti.estimate.module.hlo import read_module
from smalti.estimate.module.shapes import HBM
from smalti.estimate.module.traffic import bytes_touched
from tests.estimate.module.texts import fixture, module

MB = 2**20
BIG, ROW = 64 * 1024 * 4, 1024 * 4  # f32[64,1024], f32[1,1024]

SLICES = """
%inner (p: f32[64,1024]) -> f32[64,1024] {
  %p = f32[64,1024]{1,0} parameter(0)
  ROOT %b = f32[64,1024]{1,0} bitcast(%p)
}

%reads (p: f32[64,1024], i: s32[]) -> f32[1,1024] {
  %p.1 = f32[64,1024]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %same = f32[64,1024]{1,0} bitcast(%p.1)
  %row = f32[1,1024]{1,0} dynamic-slice(%same, %i.1, %zero), dynamic_slice_sizes={1,1024}
  ROOT %neg = f32[1,1024]{1,0} negate(%row)
}

%negated (n: f32[64,1024]) -> f32[64,1024] {
  %n = f32[64,1024]{1,0} parameter(0)
  ROOT %m = f32[64,1024]{1,0} negate(%n)
}

%reads_all (p: f32[64,1024], i: s32[]) -> f32[1,1024] {
  %p.4 = f32[64,1024]{1,0} parameter(0)
  %i.4 = s32[] parameter(1)
  %zero.4 = s32[] constant(0)
  %all.4 = f32[64,1024]{1,0} fusion(%p.4), kind=kLoop, calls=%negated
  ROOT %row.4 = f32[1,1024]{1,0} dynamic-slice(%all.4, %i.4, %zero.4), dynamic_slice_sizes={1,1024}
}

%reads_within (p: f32[64,1024], i: s32[]) -> f32[1,1024] {
  %p.2 = f32[64,1024]{1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  %zero.2 = s32[] constant(0)
  %all = f32[64,1024]{1,0} fusion(%p.2), kind=kLoop, calls=%inner
  ROOT %row.2 = f32[1,1024]{1,0} dynamic-slice(%all, %i.2, %zero.2), dynamic_slice_sizes={1,1024}
}

%writes (p: f32[64,1024], r: f32[1,1024], i: s32[]) -> (f32[64,1024], f32[1,1024]) {
  %p.3 = f32[64,1024]{1,0} parameter(0)
  %r.3 = f32[1,1024]{1,0} parameter(1)
  %i.3 = s32[] parameter(2)
  %zero.3 = s32[] constant(0)
  %twice = f32[1,1024]{1,0} add(%r.3, %r.3)
  %new = f32[64,1024]{1,0} dynamic-update-slice(%p.3, %twice, %i.3, %zero.3)
  ROOT %both = (f32[64,1024]{1,0}, f32[1,1024]{1,0}) tuple(%new, %twice)
}

"""
IN_PLACE = ', backend_config={"aliasing_operands":{"lists":[{"indices":["0","3"]}]}}'


def touched(instruction: str, space: int | None = HBM) -> tuple[int, int]:
    entry = f"""\
  %big = f32[64,1024]{{1,0}} parameter(0)
  %row = f32[1,1024]{{1,0}} parameter(1)
  %fast = f32[64,1024]{{1,0:S(1)}} copy(%big)
  %i = s32[]{{:S(6)}} constant(3)
  ROOT %op = {instruction}
"""
    read = read_module(module(entry, SLICES, "big: f32[64,1024], row: f32[1,1024]"))
    return bytes_touched(read, read.entry, read.entry.root, space)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("f32[64,1024]{1,0} add(%big, %big)", (2 * BIG, BIG)),
        ("f32[64,1024]{1,0:S(1)} add(%big, %fast)", (BIG, 0)),
        ("f32[64,1024]{1,0} copy(%fast)", (0, BIG)),
        ("f32[1,1024]{1,0} dynamic-slice(%big, %i, %i)", (ROW, ROW)),
        ("f32[1,1024]{1,0} dynamic-slice(%fast, %i, %i)", (0, ROW)),
        ("f32[1,1024]{1,0:S(1)} fusion(%big, %i), kind=kLoop, calls=%reads", (ROW, 0)),
        ("f32[1,1024]{1,0:S(1)} fusion(%fast, %i), kind=kLoop, calls=%reads", (0, 0)),
        ("f32[1,1024]{1,0:S(1)} fusion(%big, %i), kind=kLoop, calls=%reads_within", (ROW, 0)),
        ("f32[1,1024]{1,0:S(1)} fusion(%big, %i), kind=kLoop, calls=%reads_all", (BIG, 0)),
        ("f32[64,1024]{1,0:S(1)} fusion(%big), kind=kLoop, calls=%inner", (BIG, 0)),
    ],
)
def test_bytes_in_hbm(instruction, expected):
    assert touched(instruction) == expected


def test_an_update_in_place_moves_the_update():
    update = "f32[64,1024]{1,0} dynamic-update-slice(%big, %row, %i, %i)"
    assert touched(update) == (BIG + ROW, BIG)
    assert touched(update + IN_PLACE.replace("3", "4")) == (ROW, ROW)


def test_a_fusion_that_updates_in_place():
    fusion = (
        "(f32[64,1024]{1,0}, f32[1,1024]{1,0:S(1)}) fusion(%big, %row, %i), kind=kLoop, "
        "calls=%writes"
    )
    assert touched(fusion) == (BIG + ROW, BIG)
    assert touched(fusion + IN_PLACE) == (ROW, ROW)


def test_all_memories_together():
    assert touched("f32[64,1024]{1,0:S(1)} add(%big, %fast)", None) == (2 * BIG, BIG)


def test_a_product():
    read = read_module(fixture("dot"))
    (fusion,) = [i for i in read.entry.instructions if i.opcode == "fusion"]
    # One of its operands was copied to VMEM before; the other is reached through a bitcast.
    assert bytes_touched(read, read.entry, fusion, HBM) == (32 * MB, 32 * MB)
    assert bytes_touched(read, read.entry, fusion, None) == (64 * MB, 32 * MB)
