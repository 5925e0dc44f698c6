"""The kernels together, where the contract suite does not go: sequences of several major blocks,
each layout that arrays may have, and the interpreter at its strictest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smalti
from smalti import masks
from smalti.attention.tpu import block_sizes
from tests.support.calls import check, program
from tests.support.inputs import Sizes, draw, normal
from tests.support.interpreter import STRICT, no_races

LONG = Sizes(B=2, Sq=300, Sk=390, Hq=2, Hkv=1, D=8, Dv=6)  # 3 by 4 tiles


@pytest.fixture
def majors(monkeypatch):
    """Sets how many tokens are held in VMEM at most."""

    def set_most(tokens: int):
        monkeypatch.setattr(block_sizes, "MOST_MAJOR", tokens)
        monkeypatch.setattr(block_sizes, "MOST_MAJOR_WITH_BIAS", tokens)

    return set_most


def segments(low: int):
    rng = np.random.default_rng(0)
    return tuple(np.sort(rng.integers(low, 4, (2, n)), 1).astype(np.int32) for n in (300, 390))


# Each: tokens in VMEM, arguments. With 128 every pair of tiles is a step of its own, and pairs
# without visible keys have none; with 256 there are lists of several tiles, the last ones shorter.
MAJORS = {
    "none": (256, {}),
    "causal": (128, {"mask": masks.causal(), "softcap": 2.0}),
    "empty rows": (128, {"mask": masks.causal(offset=-140), "sinks": normal(2)}),
    "window": (128, {"mask": masks.sliding_window(60)}),
    "streaming": (256, {"mask": masks.streaming(sinks=3, window=60), "sinks": normal(2)}),
    "segments": (128, {"segment_ids": segments(-1), "mask": masks.causal()}),
    "a batch entry that sees nothing": (
        128,
        {"mask": masks.lengths(q=np.array([300, 130]), kv=np.array([0, 200]))},
    ),
    "bias": (256, {"mask": masks.causal(), "bias": normal(2, 2, 300, 390)}),
    "bias, one row": (
        128,
        {"mask": masks.prefix_lm(np.array([3, 200])), "bias": normal(1, 2, 1, 390)},
    ),
    "bias, one column": (128, {"bias": normal(2, 1, 300, 1), "softcap": 2.0}),
    "bias, one number": (128, {"mask": masks.causal(), "bias": normal(1, 1, 1, 1)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAJORS)
def test_several_major_blocks(majors, name):
    tokens, arguments = MAJORS[name]
    majors(tokens)
    check("pallas", draw(LONG), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [masks.causal(offset=0), masks.local(90, 40)], ids=repr)
def test_several_major_blocks_of_queries_alone(majors, mask):
    """One launch of the backward, with a list of tiles for each block of queries."""
    majors(128)
    sizes = Sizes(B=1, Sq=400, Sk=120, Hq=2, Hkv=1, D=8, Dv=6)
    check("pallas", draw(sizes), mask=mask)


@pytest.mark.slow
def test_no_room_for_the_next_heads_keys(monkeypatch):
    """Keys of one head at a time in VMEM, and their gradients."""

    def need(launch, blocks, *args, **options):
        return 0 if blocks.key_buffers == 1 else 2**40

    monkeypatch.setattr(block_sizes, "vmem_bytes", need)
    sizes = Sizes(B=2, Sq=300, Sk=260, Hq=4, Hkv=2, D=8, Dv=6)
    check("pallas", draw(sizes), mask=masks.causal(offset=-3))
    check("pallas", draw(sizes), mask=masks.causal(), bias=normal(4, 300, 260))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("D", "Dv", "layout", "dtype"),
    [
        (128, 128, "BSHD", "bfloat16"),  # heads are whole registers of lanes
        (128, 256, "BHSD", "float32"),
        (128, 128, "BSHD", "float32"),
        (96, 160, "BSHD", "bfloat16"),  # they are not, and are wide
        (96, 80, "BHSD", "float32"),
        (64, 64, "BSHD", "bfloat16"),
        (7, 1, "BHSD", "float32"),
    ],
)
def test_layouts_and_head_sizes(D, Dv, layout, dtype):
    sizes = Sizes(B=2, Sq=130, Sk=140, Hq=4, Hkv=2, D=D, Dv=Dv)
    inputs = draw(sizes, layout=layout, dtype=dtype)
    check("pallas", inputs, layout=layout, mask=masks.causal(offset=-3), sinks=normal(4))


@pytest.mark.slow
@pytest.mark.parametrize("features", [{}, {"bias": normal(1, 2, 1, 127)}], ids=["", "bias"])
def test_a_last_query_alone_in_its_tile(features):
    """All that it sees it sees whole, and nothing before that."""
    sizes = Sizes(B=1, Sq=129, Sk=127, Hq=2, Hkv=1, D=8, Dv=6)
    check("pallas", draw(sizes), mask=masks.local(9, 4), **features)


# Each: kernels launched, tokens in VMEM, sizes, arguments.
PARITY = (np.zeros((2, 9), np.int32), (np.arange(260) % 2).reshape(2, 130))
SMALL = Sizes(B=1, Sq=130, Sk=140, Hq=2, Hkv=1, D=8, Dv=6)
STRICTLY = {
    "forward and fused backward": (2, 256, SMALL, {"mask": masks.causal()}),
    "whole head in lanes": (
        2,
        256,
        Sizes(B=1, Sq=130, Sk=7, Hq=2, Hkv=1, D=128, Dv=128),
        {"sinks": normal(2)},
    ),
    "blocks of queries": (
        2,
        128,
        Sizes(B=1, Sq=260, Sk=100, Hq=1, Hkv=1, D=8, Dv=8),
        {"mask": masks.causal(offset=0)},
    ),
    "two launches of the backward": (
        3,
        128,
        SMALL,
        {"mask": masks.streaming(sinks=2, window=30)},
    ),
    "dead pairs": (
        3,
        128,
        SMALL,
        {"mask": masks.lengths(q=100, kv=20), "sinks": normal(2)},
    ),
    "gradient of a bias": (4, 128, SMALL, {"bias": normal(1, 2, 1, 140)}),
    "gradient of a whole bias": (
        3,
        256,
        Sizes(B=2, Sq=9, Sk=130, Hq=2, Hkv=2, D=8, Dv=8),
        {"bias": normal(1, 2, 9, 130), "segment_ids": PARITY},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRICTLY)
def test_in_strict_interpret_mode(majors, name):
    launches, tokens, sizes, arguments = STRICTLY[name]
    majors(tokens)
    with no_races(launches):
        check("pallas", draw(sizes), interpret=STRICT, **arguments)


@pytest.mark.slow
def test_keys_that_only_a_cap_and_a_bias_meet_may_be_nan():
    """The derivative of the cap is NaN there: 0 times it must not reach a gradient."""
    hidden = np.zeros((1, 1, 21, 140), np.float32)
    hidden[..., [0, 7, 139]] = -np.inf
    inputs = draw(Sizes(B=1, Sq=21, Sk=140, Hq=2, Hkv=1, D=8, Dv=6))
    attend = program(
        implementation="pallas", bias=hidden, softcap=2.0, mask=masks.lengths(kv=np.array([133]))
    )
    want = attend(inputs)
    for name in "kv":
        x = np.copy(getattr(inputs, name))
        x[:, [0, 7, *range(133, 140)]] = np.nan
        setattr(inputs, name, x)
    for name, x in attend(inputs).items():
        np.testing.assert_array_equal(x, want[name], err_msg=name)


@pytest.mark.slow
def test_a_band_that_nobody_is_in():
    """Two masks that exclude each other: no tile, no result, whatever the arrays hold."""
    inputs = draw(Sizes(B=1, Sq=21, Sk=140, Hq=2, Hkv=1, D=8, Dv=6))
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[:] = np.nan
    mask = masks.causal(offset=-1) & masks.local(0, 10)
    attend = program(implementation="pallas", mask=mask, sinks=np.zeros(2, np.float32))
    got = attend(inputs)
    np.testing.assert_array_equal(got.pop("lse"), np.zeros((1, 2, 21)))
    np.testing.assert_allclose(got.pop("dsinks"), inputs.dlse.sum((0, 2)), rtol=1e-5)
    for name, x in got.items():
        assert not x.any(), name


@pytest.mark.slow
def test_the_sinks_of_empty_rows_pass_through_no_nan():
    """Outside of jit, where `jax.debug_nans` sees what a `where` would have hidden."""
    inputs = draw(Sizes(B=1, Sq=20, Sk=24, Hq=2, Hkv=1, D=8, Dv=8))

    def loss(sinks):
        arrays = map(jnp.asarray, (inputs.q, inputs.k, inputs.v))
        mask, options = masks.causal(offset=-5), {"implementation": "pallas", "interpret": True}
        return smalti.attention(*arrays, sinks=sinks, mask=mask, **options).sum()

    with jax.debug_nans(True):
        dsinks = jax.grad(loss)(jnp.ones(2))
    assert np.isfinite(dsinks).all()


@pytest.mark.parametrize("name", ["q", "bias"])
def test_what_mosaic_cannot_load_is_refused(name):
    shapes = {"q": (1, 8, 2, 16), "k": (1, 8, 2, 16), "v": (1, 8, 2, 16), "bias": (1, 1, 8, 8)}
    half = ("q", "k", "v") if name == "q" else ("bias",)
    arrays = {
        key: np.zeros(shape, np.float16 if key in half else np.float32)
        for key, shape in shapes.items()
    }
    with pytest.raises(NotImplementedError, match=rf"float16 \(.*{name}.*\): Mosaic, .* bfloat16"):
        smalti.attention(**arrays, implementation="pallas", interpret=True)


def test_scalars_that_do_not_fit_smem_are_refused_with_the_arithmetic():
    weight = jnp.zeros((2048, 512))
    shape = jax.ShapeDtypeStruct((2048, 8, 512, 16), jnp.float32)

    def attend(q):
        return smalti.attention(
            *(q, q, q),
            score_mod=lambda score, b, h, q_idx, kv_idx: score * weight[b, h],
            implementation="pallas",
            interpret=True,
        )

    message = r"take 4,194,304 bytes of SMEM \(4,194,304 for the numbers of score_mod\)"
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(attend, shape)


def test_lists_of_tiles_that_do_not_fit_smem_say_so(majors):
    """What is known of them when blocks are, too late for another implementation."""
    majors(128)
    q = jax.ShapeDtypeStruct((16, 16384, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((16, 16384), jnp.int32)

    def attend(q, ids):
        tiles = smalti.BlockSizes(128, 128)
        how = {"implementation": "pallas", "interpret": True, "block_sizes": tiles}
        return smalti.attention(q, q, q, mask=masks.document(ids), **how)

    message = r"1,048,576 for the blocks that pairs without tiles hold .* or use implementation="
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(attend, q, ids)
