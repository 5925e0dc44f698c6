import numpy as np
import pytest

from smalti.estimate.peers import matmul_variant, xla_matmul_variant
from tests.estimate.peers.support import arrays, interpret, lower


def test_the_blocked_product_is_a_product(monkeypatch):
    interpret(monkeypatch)
    variant = matmul_variant(256, 384, 512, bm=128, bk=128, bn=256)
    x, y = arrays(variant.args)
    expected = np.asarray(x, np.float32) @ np.asarray(y, np.float32)
    np.testing.assert_allclose(
        np.asarray(variant.fn(x, y), np.float32), expected, rtol=1e-2, atol=0.2
    )


def test_both_products_lower_for_a_tpu():
    kernel = lower(matmul_variant(1024, 1024, 1024, bm=512, bk=1024, bn=1024))
    assert kernel.mlir_module().count("tpu_custom_call") == 1
    xla = lower(xla_matmul_variant(1024, 1024, 1024))
    assert "tpu_custom_call" not in xla.mlir_module()
    assert [x.dtype for x in (*kernel.out_avals, *xla.out_avals)] == ["bfloat16", "bfloat16"]


def test_names():
    variant = matmul_variant(1024, 1024, 1024, bm=512, bk=1024, bn=1024)
    assert variant.name == "matmul bm=512 bk=1024 bn=1024"
    assert xla_matmul_variant(8, 8, 8).name == "xla_matmul"


def test_a_block_that_does_not_divide_is_refused():
    variant = matmul_variant(256, 256, 256, bm=128, bk=100, bn=128)
    with pytest.raises(ValueError, match="bk=100 does not divide 256"):
        variant.fn(*arrays(variant.args))
