import re

import pytest

from smalti.estimate.peers import AttentionCase
from smalti.estimate.peers.case import known


def test_a_shape_is_read():
    case = AttentionCase.parse("B=2, Hq=8,Hkv=2,S=4096,D=128", mask="full", layout="BSHD")
    assert case == AttentionCase(
        B=2, Hq=8, Hkv=2, Sq=4096, Sk=4096, D=128, mask="full", layout="BSHD"
    )
    assert (case.value_dim, case.window, case.causal, case.scale) == (128, None, False, 128**-0.5)
    q, k, v = case.inputs()
    assert q.shape == (2, 4096, 8, 128)
    assert k.shape == v.shape == (2, 4096, 2, 128)
    assert case.output() == q


def test_lengths_and_widths_may_differ():
    case = AttentionCase.parse(
        "B=1,Hq=2,Hkv=2,Sq=128,Sk=256,D=192,Dv=128", mask="sliding_window(64)", dtype="float32"
    )
    assert (case.window, case.causal) == (64, True)
    assert [s.shape for s in case.inputs()] == [
        (1, 2, 128, 192),
        (1, 2, 256, 192),
        (1, 2, 256, 128),
    ]
    assert case.output().shape == (1, 2, 128, 128)
    assert case.output().dtype == "float32"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            "B=1,Hq=8,Hvk=8,S=64,D=128",
            "shape: unknown key 'Hvk'; known: B, Hq, Hkv, S, Sq, Sk, D, Dv; did you mean 'Hkv'?",
        ),
        ("B=1,Hq=8,S=64,D=128", "shape: Hkv missing; got 'B=1,Hq=8,S=64,D=128'"),
        ("B=1,Hq=8,Hkv=8,D=128", "shape: Sq, Sk missing (S=… gives Sq and Sk)"),
        ("B=1,Hq=8,Hkv=8,S=4k,D=128", "shape: S='4k' is not a whole number"),
        ("B=1,Hq=8,Hkv=8,S=64,Sk=64,D=128", "shape: S is Sq and Sk; drop S, or drop Sk"),
        ("B=1,B=2,Hq=8,Hkv=8,S=64,D=128", "shape: B is given twice"),
        ("B=1,Hq,Hkv=8,S=64,D=128", "shape: 'Hq' is not key=number, as in S=4096"),
        ("", "shape: '' is not key=number"),
        ("B=0,Hq=8,Hkv=8,S=64,D=128", "B=0: a size is at least 1"),
        ("B=1,Hq=8,Hkv=3,S=64,D=128", "Hq=8 is not a multiple of Hkv=3"),
    ],
)
def test_a_wrong_shape_is_refused(shape, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AttentionCase.parse(shape)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"mask": "casual"},
            "mask: unknown value 'casual'; known: causal, full, sliding_window(n)",
        ),
        ({"mask": "casual"}, "did you mean 'causal'?"),
        ({"mask": "CAUSAL"}, "did you mean 'causal'?"),
        ({"mask": "sliding_window"}, "did you mean 'sliding_window(n)'?"),
        ({"mask": "sliding_window(0)"}, "unknown value 'sliding_window(0)'"),
        ({"dtype": "bf16"}, "dtype: unknown value 'bf16'; known: bfloat16, float32"),
        ({"layout": "BHDS"}, "layout: unknown value 'BHDS'; known: BHSD, BSHD"),
    ],
)
def test_a_wrong_option_is_refused(option, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AttentionCase.parse("B=1,Hq=1,Hkv=1,S=64,D=128", **option)


def test_queries_without_a_key_are_refused():
    with pytest.raises(ValueError, match="leaves the first queries without a key"):
        AttentionCase(B=1, Hq=1, Hkv=1, Sq=256, Sk=128, D=128)
    assert AttentionCase(B=1, Hq=1, Hkv=1, Sq=256, Sk=128, D=128, mask="full").Sq == 256


def test_the_nearest_name_is_offered_only_where_one_is_near():
    with pytest.raises(ValueError, match=r"^peer: unknown peer 'zzz'; known: a, b$"):
        known("peer", "zzz", ("a", "b"), noun="peer")
