import pytest

from smalti.estimate.module.shapes import HBM, VMEM, parse_shape, split_top


def test_everything_a_layout_may_hold():
    shape = parse_shape("s4[2,<=3]{1,0:T(8,128)(8,1)E(4)S(1)}")
    assert (shape.dtype, shape.dims, shape.minor_to_major) == ("s4", (2, 3), (1, 0))
    assert (shape.tiles, shape.bits, shape.space) == (((8, 128), (8, 1)), 4, VMEM)


def test_tuples_nest_and_skip_comments():
    shape = parse_shape("((f32[2]{0}), /*index=1*/u32[]{:S(2)}, ())")
    assert [(leaf.dtype, leaf.space) for leaf in shape.leaves] == [("f32", HBM), ("u32", 2)]
    assert shape.parts is not None
    assert len(shape.parts) == 3


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("f32[4096,1]{1,0:T(8,128)}", 4096 * 128 * 4),  # one lane of 128 is used
        ("f32[4096,1]{0,1:T(8,128)}", 4096 * 8 * 4),  # one sublane of 8
        ("bf16[10]{0:T(256)(128)(2,1)}", 512),
        ("s8[1,4,4]{2,1,0:T(4,128)(4,1)}", 512),
        ("s4[2,3]{1,0:T(8,128)(8,1)E(4)}", 512),
        ("bf16[3,5]{1,0}", 30),
        ("bf16[]", 2),
        ("f32[]{:T(128)}", 512),
        ("f32[0,128]{1,0:T(8,128)}", 0),
        ("(f32[2]{0}, bf16[2]{0})", 12),
        ("token[]", 0),
    ],
)
def test_bytes_with_the_padding_of_tiles(text, stored):
    assert parse_shape(text).stored_bytes == stored


def test_bytes_of_one_memory():
    shape = parse_shape("(f32[2]{0:S(1)}, bf16[2]{0}, u32[]{:S(2)})")
    assert (shape.stored_in(VMEM), shape.stored_in(HBM), shape.stored_in(None)) == (8, 4, 16)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f33[2]{0}", "not a shape: 'f33"),
        ("f32[2", "not a shape"),
        ("f32[2]{0", "not a shape"),
        ("(f32[2]{0}", "not a shape"),
        ("f32[?]{0}", "without a bound"),
        ("f32[2,2]{0}", "does not fit its dimensions"),
        ("f32[2]{0:T(*)}", "a tile of unknown form"),
        ("f32[2]{0:T(8}", "not a layout"),
        ("f32[2]{0:X(8)}", "unknown part 'X'"),
    ],
)
def test_what_is_no_shape(text, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace("*", r"\*")):
        parse_shape(text)


def test_split_keeps_brackets_and_strings_whole():
    assert split_top('a, {b, c}, "d, {", (e, [f, g])') == ["a", "{b, c}", '"d, {"', "(e, [f, g])"]
    assert split_top("") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [("a)", "closes nothing"), ("{a]", "closes nothing"), ("{a", "not closed"), ('"a', "not end")],
)
def test_split_refuses_what_does_not_match(text, says):
    with pytest.raises(ValueError, match=says):
        split_top(text)
