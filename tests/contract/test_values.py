"""Results, lse and all gradients against the oracle, within their error budgets."""

import numpy as np
import pytest

import smalti
from smalti import masks
from tests.support.calls import IMPLEMENTATIONS, check, program
from tests.support.cases import FEATURES, MASKS, SIZES, relative, spread
from tests.support.inputs import DTYPES, LOGITS, Sizes, draw, normal

SMALL = Sizes(B=2, Sq=37, Sk=29, Hq=4, Hkv=2, D=8, Dv=6)


def cases():
    for implementation in IMPLEMENTATIONS:
        for case in spread(MASKS, SIZES, FEATURES, times=2):
            yield implementation, *case


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "mask", "sizes", "feature"), list(cases()))
def test_masks(implementation, mask, sizes, feature):
    sizes = SIZES[sizes]
    arguments = MASKS[mask](sizes) | FEATURES[feature](sizes)
    check(implementation, draw(sizes), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "logits"),
    [
        *(("float32", logits) for logits in LOGITS),
        *(("bfloat16", logits) for logits in ("normal", "large")),
        *(("float16", logits) for logits in ("normal", "sharp")),
    ],
)
def test_dtypes_and_logits(implementation, dtype, logits):
    sizes = Sizes(B=1, Sq=300, Sk=300, Hq=2, Hkv=1, D=32, Dv=32)
    check(implementation, draw(sizes, dtype=dtype, logits=logits), mask=masks.causal())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_features_in_low_precision(implementation, dtype, layout):
    arguments = FEATURES["all"](SMALL)
    arguments["bias"] = arguments["bias"].astype(DTYPES[dtype])
    arguments["sinks"] = arguments["sinks"].astype(DTYPES[dtype])
    inputs = draw(SMALL, dtype=dtype, layout=layout)
    check(implementation, inputs, layout=layout, mask=masks.causal(), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (2, 1, 37, 1), (1, 4, 1, 29), (2, 4, 37, 29), (37, 29), (29,)],
    ids=str,
)
def test_bias_of_every_broadcast_shape(implementation, shape):
    bias = normal(*shape, seed="bias")
    check(implementation, draw(SMALL), bias=bias, mask=masks.causal())


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scale(implementation, scale):
    check(implementation, draw(SMALL), scale=scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiled", "tiles"),
    [
        *(("blockwise", tiles) for tiles in ((32, 16), (64, 256), (7, 5))),
        *(("pallas", tiles) for tiles in ((128, 256), (256, 128), (512, 512))),
    ],
    ids=str,
)
def test_results_do_not_depend_on_tile_sizes(tiled, tiles):
    """The reference has none: test_errors.py shows that it refuses block_sizes."""
    sizes = SIZES["129x127 MQA D7 Dv5"]
    arguments = MASKS["segment_ids, padded"](sizes) | FEATURES["all"](sizes)
    check(tiled, draw(sizes), block_sizes=smalti.BlockSizes(*tiles), **arguments)


@pytest.mark.parametrize(("hq", "hkv"), [(6, 2), (28, 4), (5, 5)])
def test_grouped_heads(implementation, hq, hkv):
    sizes = Sizes(B=1, Sq=19, Sk=19, Hq=hq, Hkv=hkv, D=4, Dv=4)
    arguments = FEATURES["sinks"](sizes) | FEATURES["score_mod per head"](sizes)
    check(implementation, draw(sizes), mask=masks.causal(), **arguments)


def test_two_runs_are_bitwise_equal(implementation):
    sizes = SIZES["300x300"]
    arguments = MASKS["streaming"](sizes) | FEATURES["all"](sizes)
    inputs = draw(sizes)
    attend = program(implementation=implementation, **arguments)
    first, second = attend(inputs), attend(inputs)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_score_mod_at_lengths_that_are_no_multiples(implementation):
    """pytorch#153799: ``score + (q − kv)`` under a causal mask gave NaN gradients at 257."""
    sizes = Sizes(B=1, Sq=257, Sk=257, Hq=1, Hkv=1, D=8, Dv=8)
    length = 2 * sizes.Sq - 1
    table = (np.arange(length) - length // 2).astype(np.float32)
    check(
        implementation,
        draw(sizes),
        mask=masks.causal(),
        score_mod=relative,
        captured=(table, np.float32(1).reshape(())),
    )
