"""Which implementation runs, and why."""

import jax
import jax.numpy as jnp
import pytest

import smalti
from smalti import masks

Q = jax.ShapeDtypeStruct((1, 8, 4, 16), jnp.float32)
K = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)


def test_a_choice_says_what_and_why():
    choice = smalti.explain_choice(Q, K, K, mask=masks.causal(), return_lse=True)
    assert choice.implementation == "blockwise"
    assert str(choice) == (
        "blockwise on cpu: plain JAX that visits only the tiles the mask leaves alive"
    )
    assert smalti.explain_choice(Q, K, K, implementation="reference").reason == (
        "named by the caller"
    )


def test_arrays_and_shapes_are_checked_alike():
    for q, k in ((Q, K), (jnp.zeros(Q.shape), jnp.zeros(K.shape))):
        with pytest.raises(ValueError, match="q and k must have the same head size"):
            smalti.explain_choice(q, jax.eval_shape(lambda x: x[..., :8], k), k)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"implementation": "palas"}, ValueError, "Did you mean 'pallas'"),
        (
            {"implementation": "pallas"},
            NotImplementedError,
            r"implementation='pallas': .* this is a cpu. Pass interpret=True",
        ),
        (
            {
                "implementation": "pallas",
                "interpret": True,
                "score_mod": lambda s, b, h, i, j: s + jnp.ones((8, 8))[i, j],
            },
            NotImplementedError,
            r"implementation='pallas': score_mod: it reads an array .* Pass such an array as bias=",
        ),
        (
            {
                "implementation": "pallas",
                "interpret": True,
                "block_sizes": smalti.BlockSizes(128, 100),
            },
            ValueError,
            "BlockSizes.block_kv: got 100; .* multiples of 128.* The nearest is 128",
        ),
        ({"interpret": True}, ValueError, "applies to 'pallas' only"),
        (
            {"implementation": "reference", "block_sizes": smalti.BlockSizes(8, 8)},
            ValueError,
            "'reference' has no tiles",
        ),
        ({"block_sizes": (8, 8)}, ValueError, "it must be a smalti.BlockSizes"),
        ({"windw": 3}, TypeError, "windw"),
    ],
)
def test_what_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        smalti.explain_choice(Q, K, K, **arguments)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_block_sizes_are_checked(size):
    with pytest.raises(ValueError, match=r"BlockSizes.block_q: got .* at least 1"):
        smalti.BlockSizes(size, 8)


@pytest.mark.parametrize(
    ("score_mod", "why"),
    [
        (lambda s, b, h, i, j: jax.lax.cond(i >= j, lambda x: x, lambda x: -x, s), "uses 'cond'"),
        (lambda s, b, h, i, j: s + jnp.ones((8, 8))[i, j], "bias="),
        (lambda s, b, h, i, j: s * jnp.ones((2048, 512))[b, h], "4,194,304 bytes of SMEM"),
    ],
    ids=["conditional", "array", "SMEM"],
)
def test_what_kernels_cannot_do_runs_elsewhere_on_a_tpu(score_mod, why):
    shape = jax.ShapeDtypeStruct((2048, 8, 512, 16), jnp.float32)
    device = jax.sharding.AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        choice = smalti.explain_choice(shape, shape, shape, score_mod=score_mod)
        assert choice.implementation == "blockwise"
        assert why in choice.reason
        with pytest.raises(NotImplementedError, match=why.partition("=")[0]):
            smalti.explain_choice(
                *(shape, shape, shape), score_mod=score_mod, implementation="pallas"
            )
