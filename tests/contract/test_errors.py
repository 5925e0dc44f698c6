"""Every wrong argument is refused, with which it is, what was got, what is allowed, what to do."""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

import smalti
from smalti import masks
from tests.support.inputs import Sizes, draw

INPUTS = draw(Sizes(B=2, Sq=6, Sk=9, Hq=4, Hkv=2, D=8, Dv=5))
IDS = np.zeros((2, 6), np.int32)


def refused(error, *parts: str, implementation=None, **arguments):
    q, k, v = (arguments.pop(name, getattr(INPUTS, name)) for name in "qkv")
    with pytest.raises(error) as caught:
        smalti.attention(q, k, v, implementation=implementation, **arguments)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


OTHER = masks.build_block_mask(masks.causal(), 2, 4, 9, 9, 4, 4)

CASES = {
    "mask as text": (ValueError, {"mask": "causal"}, ["mask: got 'causal'", "smalti.masks.parse"]),
    "mask not called": (
        ValueError,
        {"mask": masks.causal},
        ["mask: got the function causal itself", "mask=smalti.masks.causal(…)"],
    ),
    "mask of floats": (
        ValueError,
        {"mask": np.zeros((6, 9), np.float32)},
        ["mask: got an array of dtype float32", "Pass additive masks as bias="],
    ),
    "mask of another shape": (
        ValueError,
        {"mask": np.zeros((6, 8), bool)},
        ["mask: the boolean array has shape", "(1, 1, 6, 8)", "[2, 4, 6, 9]"],
    ),
    "mask of five dimensions": (
        ValueError,
        {"mask": np.zeros((1, 1, 1, 6, 9), bool)},
        ["mask: got 5 dimensions; at most 4"],
    ),
    "mask_mod that branches": (
        ValueError,
        {"mask": lambda b, h, q_idx, kv_idx: q_idx > 3 and kv_idx < 2},
        ["mask_mod: it branches on the value", "use `&`, `|`, `~`"],
    ),
    "mask_mod of two arguments": (
        ValueError,
        {"mask": lambda q_idx, kv_idx: q_idx > kv_idx},
        ["mask_mod: it must take (b, h, q_idx, kv_idx)"],
    ),
    "mask_mod that is a number": (
        ValueError,
        {"mask": lambda b, h, q_idx, kv_idx: q_idx - kv_idx},
        ["mask_mod: for scalar arguments it must return one scalar, boolean", "int32"],
    ),
    "mask_mod that is to be added": (
        ValueError,
        {"mask": lambda b, h, q_idx, kv_idx: jnp.where(q_idx < kv_idx, -jnp.inf, 0.0)},
        ["float32[])", "to be added to scores goes into score_mod or bias."],
    ),
    "mask_mod without return": (
        ValueError,
        {"mask": lambda b, h, q_idx, kv_idx: None},
        ["it returned (None). Is a `return` missing?"],
    ),
    "BlockMask of other sizes": (
        ValueError,
        {"mask": OTHER},
        ["mask: this BlockMask was built for", "[2, 4, 9, 9]", "[2, 4, 6, 9]", "build_block_mask"],
    ),
    "document of other lengths": (
        ValueError,
        {"mask": masks.document(IDS)},
        ["document: kv ids have shape [2, 6]", "[2, 9]", "give a tuple (q_ids, kv_ids)"],
    ),
    "offset of another batch": (
        ValueError,
        {"mask": masks.causal(offset=np.arange(3))},
        ["offset has 3 entries", "2 batch entries"],
    ),
    "score_mod not a function": (ValueError, {"score_mod": 2.0}, ["score_mod: got float"]),
    "score_mod that is an index": (
        ValueError,
        {"score_mod": lambda score, b, h, q_idx, kv_idx: q_idx},
        ["score_mod: for scalar arguments it must return one scalar, floating-point", "int32"],
    ),
    "score_mod of four arguments": (
        ValueError,
        {"score_mod": lambda score, b, h, q_idx: score},
        ["score_mod: it must take (score, b, h, q_idx, kv_idx)"],
    ),
    "bias of another shape": (
        ValueError,
        {"bias": np.zeros((2, 6, 9), np.float32)},
        ["bias: got shape [2, 6, 9]", "[2, 4, 6, 9]"],
    ),
    "bias of booleans": (
        ValueError,
        {"bias": np.zeros((6, 9), bool)},
        ["bias: got dtype bool", "pass it as mask="],
    ),
    "bias as a number": (ValueError, {"bias": 1.0}, ["bias: got float"]),
    "segment_ids, one for two lengths": (
        ValueError,
        {"segment_ids": IDS},
        ["segment_ids: Sq = 6 and Sk = 9 differ", "pair"],
    ),
    "segment_ids of another shape": (
        ValueError,
        {"segment_ids": (IDS, IDS)},
        ["segment_ids: got shape [2, 6]", "[2, 9]"],
    ),
    "segment_ids of floats": (
        ValueError,
        {"segment_ids": (IDS * 1.0, IDS)},
        ["segment_ids: got float64", "int32"],
    ),
    "softcap as an array": (
        TypeError,
        {"softcap": jnp.float32(3)},
        ["softcap: got an array", "Python float", "score_mod"],
    ),
    "scale as an array": (
        TypeError,
        {"scale": np.ones(4)},
        ["scale: got an array", "Python float", "score_mod"],
    ),
    "scale as text": (TypeError, {"scale": "1"}, ["scale: got '1'"]),
    "scale not finite": (ValueError, {"scale": float("nan")}, ["scale: got nan", "finite"]),
    "softcap of 0": (ValueError, {"softcap": 0.0}, ["softcap: got 0.0", "positive"]),
    "softcap beyond float32": (ValueError, {"softcap": 3e38}, ["softcap: got 3e+38", "1e38"]),
    "interpret as text": (
        ValueError,
        {"implementation": "pallas", "interpret": "yes"},
        ["interpret: got 'yes'", "InterpretParams"],
    ),
    "softcap below 0": (ValueError, {"softcap": -2.0}, ["softcap: got -2.0", "positive"]),
    "sinks as a count": (ValueError, {"sinks": 4}, ["sinks: got int", "masks.streaming(sinks=…)"]),
    "sinks of key heads": (
        ValueError,
        {"sinks": np.zeros(2, np.float32)},
        ["sinks: got float32[2]", "[Hq] = [4]"],
    ),
    "layout": (ValueError, {"layout": "BSDH"}, ["layout: got 'BSDH'", "'BSHD', 'BHSD'"]),
    "layout mixed up": (
        ValueError,
        {"layout": "BHSD"},
        ["k: got q [2, 6, 4, 8]", "layout='BHSD'"],
    ),
    "implementation": (
        ValueError,
        {"implementation": "blockwize"},
        ["implementation: got 'blockwize'", "'reference'", "Did you mean 'blockwise'?"],
    ),
    "interpret": (
        ValueError,
        {"implementation": "blockwise", "interpret": True},
        ["interpret: got True", "'blockwise'", "'pallas' only"],
    ),
    "block_sizes of the reference": (
        ValueError,
        {"implementation": "reference", "block_sizes": smalti.BlockSizes(8, 8)},
        ["block_sizes: 'reference' has no tiles"],
    ),
    "block_sizes as a tuple": (
        ValueError,
        {"block_sizes": (8, 8)},
        ["block_sizes: got (8, 8)", "must be a smalti.BlockSizes"],
    ),
    "pallas on a CPU": (
        NotImplementedError,
        {"implementation": "pallas"},
        ["implementation='pallas'", "'blockwise'"],
    ),
    "q of integers": (
        ValueError,
        {"q": INPUTS.q.astype(np.int32)},
        ["q: got dtype int32", "float32, bfloat16 and float16", "q.astype(jnp.float32)"],
    ),
    "q in float64": (ValueError, {"q": INPUTS.q.astype(np.float64)}, ["q: got dtype float64"]),
    "k of another dtype": (
        ValueError,
        {"k": jnp.asarray(INPUTS.k, jnp.bfloat16)},
        ["k, v: got q float32, k bfloat16, v float32", "one dtype"],
    ),
    "q as a list": (ValueError, {"q": [1.0]}, ["q: got list"]),
    "q of three dimensions": (ValueError, {"q": INPUTS.q[0]}, ["q [6, 4, 8]", "[B, S, H, D]"]),
    "no keys": (
        ValueError,
        {"k": INPUTS.k[:, :0], "v": INPUTS.v[:, :0]},
        ["k: got", "at least 1"],
    ),
    "another batch": (ValueError, {"q": INPUTS.q[:1]}, ["k, v: got q [1, 6", "batch size B"]),
    "v of another length": (ValueError, {"v": INPUTS.v[:, 1:]}, ["v: got", "length Sk"]),
    "another head size": (ValueError, {"q": INPUTS.q[..., :4]}, ["k: got", "head size D"]),
    "heads that do not divide": (
        ValueError,
        {"q": INPUTS.q[:, :, :3]},
        ["the query heads (3) must be a multiple of the key heads (2)", "layout='BHSD'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    error, arguments, parts = CASES[name]
    refused(error, *parts, **arguments)


@pytest.mark.parametrize("name", CASES)
def test_explain_choice_refuses_the_same(name):
    error, arguments, parts = CASES[name]
    arguments = dict(arguments)
    q, k, v = (arguments.pop(x, getattr(INPUTS, x)) for x in "qkv")
    with pytest.raises(error, match=re.escape(parts[0])):
        smalti.explain_choice(q, k, v, **arguments)


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: a and b,
        lambda a, b: a or b,
        lambda a, b: not a,
        lambda a, b: a if a else b,
    ],
    ids=["and", "or", "not", "if"],
)
def test_python_operators_do_not_combine_masks(combine):
    with pytest.raises(TypeError, match=r"Use `&`, `\|` and `~`"):
        combine(masks.causal(), masks.local(1, 1))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "128"])
def test_block_sizes(size):
    with pytest.raises(ValueError, match=r"BlockSizes.block_kv: got .* int of at least 1"):
        smalti.BlockSizes(block_q=8, block_kv=size)


def test_an_unknown_argument_is_a_type_error():
    attention = functools.partial(smalti.attention, INPUTS.q, INPUTS.k, INPUTS.v)
    with pytest.raises(TypeError, match="is_causal"):
        attention(is_causal=True)


def test_explain_choice():
    q, k, v = INPUTS.q, INPUTS.k, INPUTS.v
    choice = smalti.explain_choice(q, k, v)
    assert (choice.implementation, choice.platform) == ("blockwise", "cpu")
    assert str(choice) == f"blockwise on cpu: {choice.reason}"
    named = smalti.explain_choice(q, k, v, implementation="reference", return_lse=True)
    assert (named.implementation, named.reason) == ("reference", "named by the caller")
