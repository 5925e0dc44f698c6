import pytest

from smalti.cli.options import numbers_by_name, split_flags


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
