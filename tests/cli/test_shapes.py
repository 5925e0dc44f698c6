import jax
import jax.numpy as jnp
import pytest

from smalti.cli.shapes import parse_args, spell, to_structs


def test_shapes_are_read_and_spelled():
    args = parse_args("bf16[1,8,4096,128], f32[128],s32[],pred[2],bfloat16[ 3 ]")
    assert args == [
        jax.ShapeDtypeStruct((1, 8, 4096, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((128,), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.bool_),
        jax.ShapeDtypeStruct((3,), jnp.bfloat16),
    ]
    assert spell(args) == ["bf16[1,8,4096,128]", "f32[128]", "s32[]", "pred[2]", "bf16[3]"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32", "cannot be read from 'f32' on: write them as dtype"),
        ("f32[8],", "cannot be read from '' on"),
        ("f32[8", r"cannot be read from 'f32\[8' on"),
        ("f32[8] f32[8]", r"have 'f32\[8\]' where a comma was due"),
        ("f32[8,,8]", r"the sizes \[8,,8\] are not whole numbers"),
        ("bf61[8]", "unknown dtype 'bf61'; known: pred, .*; did you mean bf16"),
        ("BF16[8]", "unknown dtype 'BF16'; known: pred, .*; did you mean bf16"),
    ],
)
def test_other_forms_are_refused(text, expected):
    with pytest.raises(ValueError, match=expected):
        parse_args(text)


def test_a_file_may_give_trees():
    shape = jax.ShapeDtypeStruct((4,), jnp.int8)
    tree = to_structs({"w": "f32[8,4]", "b": shape})
    assert tree == {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32), "b": shape}
    with pytest.raises(ValueError, match="holds 2 arrays; each text is one"):
        to_structs("f32[1],f32[2]")
