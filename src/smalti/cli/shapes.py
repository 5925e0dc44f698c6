"""Arguments' shapes as text, in HLO's spelling: `bf16[1,8,4096,128],f32[]`."""

import difflib
import re
from typing import Any

import jax
import jax.numpy as jnp

# HLO's names of dtypes; numpy's are understood as well.
DTYPES = {
    "pred": "bool",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "s8": "int8",
    "s16": "int16",
    "s32": "int32",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_ARRAY = re.compile(r"\s*(\w+)\s*\[([\d\s,]*)\]\s*")


def parse_args(text: str) -> list[jax.ShapeDtypeStruct]:
    """`bf16[8,128],f32[]` as shapes. Raises ValueError for any other form and unknown dtypes."""
    found, at = [], 0
    while True:
        match = _ARRAY.match(text, at)
        if match is None:
            raise ValueError(
                f"the shapes {text!r} cannot be read from {text[at:].strip()[:40]!r} on: write "
                "them as dtype[sizes], joined by commas, as in bf16[1,8,4096,128],f32[]"
            )
        found.append(_struct(*match.groups()))
        at = match.end()
        if at == len(text):
            return found
        if text[at] != ",":
            raise ValueError(
                f"the shapes {text!r} have {text[at:][:20]!r} where a comma was due: write them as "
                "bf16[1,8,4096,128],f32[]"
            )
        at += 1


def to_structs(value: Any) -> Any:
    """What a file says of its arguments: strings in HLO's spelling become shapes, in any pytree."""

    def struct(leaf: Any) -> Any:
        if not isinstance(leaf, str):
            return leaf
        parsed = parse_args(leaf)
        if len(parsed) != 1:
            raise ValueError(f"{leaf!r} holds {len(parsed)} arrays; each text is one")
        return parsed[0]

    return jax.tree.map(struct, value)


def spell(args: Any) -> list[str]:
    """The arrays of all arguments, in HLO's spelling."""
    short = {name: hlo for hlo, name in DTYPES.items()}
    return [
        f"{short.get(str(leaf.dtype), leaf.dtype)}[{','.join(map(str, leaf.shape))}]"
        for leaf in jax.tree.leaves(args)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    ]


def _struct(dtype: str, sizes: str) -> jax.ShapeDtypeStruct:
    names = [*DTYPES, *DTYPES.values()]
    if dtype not in names:
        near = difflib.get_close_matches(dtype.lower(), names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}{hint}")
    parts = [part.strip() for part in sizes.split(",")] if sizes.strip() else []
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"the sizes [{sizes}] are not whole numbers joined by commas")
    return jax.ShapeDtypeStruct(tuple(map(int, parts)), jnp.dtype(DTYPES.get(dtype, dtype)))
