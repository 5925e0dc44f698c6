import numpy as np
import pytest

from smalti.cli.options import numbers_by_name, operands_by_kernel, split_flags


def test_numbers_by_name():
    assert numbers_by_name("--trip-count", ["while.3=12", "%while=0"]) == {
        "while.3": 12,
        "while": 0,
    }
    with pytest.raises(ValueError, match=r"--branch 'while' is not NAME=NUMBER, as in --branch wh"):
        numbers_by_name("--branch", ["while"])
    with pytest.raises(ValueError, match="--branch: c is given twice"):
        numbers_by_name("--branch", ["c=1", "c=2"])


def test_flags():
    assert split_flags("--a=1  --b='x y'") == ("--a=1", "--b=x y")
    assert split_flags("") == ()
    with pytest.raises(ValueError, match="cannot be split into flags: No closing quotation"):
        split_flags("--a='")


def test_operands(tmp_path):
    table = tmp_path / "table.npy"
    np.save(table, np.ones((2, 3), np.int8))
    found = operands_by_kernel(["%gather.1:0=2,0,-1", f"gather.1:3={table}", "other:0=7"])
    assert found["gather.1"][0].tolist() == [2, 0, -1]
    assert found["gather.1"][0].dtype == np.int32
    assert found["gather.1"][3].shape == (2, 3)
    assert found["other"][0].tolist() == [7]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["gather.1=3"], "is not KERNEL:NUMBER=VALUES"),
        (["k:0=a,b"], "is neither whole numbers of 32 bits"),
        (["k:0=4294967296"], "is neither whole numbers of 32 bits"),
        (["k:0=missing.npy"], "missing.npy cannot be read"),
        (["k:0=1", "k:0=2"], "operand 0 of k is given twice"),
    ],
)
def test_operands_that_cannot_be_read(texts, said):
    with pytest.raises(ValueError, match=said):
        operands_by_kernel(texts)
