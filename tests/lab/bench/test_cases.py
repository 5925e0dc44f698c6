import fnmatch

import numpy as np
import pytest

from smalti.lab.bench.cases import B, D, H, all_cases, make_inputs, quick, visible


def test_names_are_unique_and_say_what_is_measured():
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    assert "causal/f32/4096/fwd" in names
    assert len(fnmatch.filter(names, "window/*/fwd")) == 2


def test_a_bar_stands_only_beside_a_peer_that_runs():
    for case in all_cases():
        assert set(case.bars) <= set(case.peers), case.name
        assert not set(case.left_out) & set(case.peers), case.name
        assert all(bar >= 2 for bar in case.bars.values())


def test_quick_cases_have_no_bars():
    assert all(quick(case).bars == {} and quick(case).S == case.S // 8 for case in all_cases())


def test_inputs_are_a_function_of_the_case_and_hold_eight_documents():
    case = quick(all_cases()[0])
    first, second = make_inputs(case), make_inputs(case)
    assert first.q.shape == (B, case.S, H, D)
    np.testing.assert_array_equal(first.v, second.v)
    assert sorted(set(first.ids.tolist())) == list(range(8))
    assert (np.diff(first.ids) >= 0).all()


@pytest.mark.parametrize(
    ("mask", "query", "keys"),
    [
        ("causal", 2, {0, 1, 2}),
        ("window", 600, set(range(89, 601))),  # exactly 512 keys, its own included
        ("streaming", 600, {0, 1, 2, 3} | set(range(89, 601))),
        ("documents", 600, {599, 600}),
    ],
)
def test_visible(mask, query, keys):
    j = np.arange(700)
    seen = visible(mask, np.full_like(j, query), j, (j >= 599).astype(np.int32))
    assert set(j[seen].tolist()) == keys


def test_an_unknown_mask_is_refused():
    with pytest.raises(ValueError, match="mask is 'casual'; the benchmark knows causal, window"):
        visible("casual", np.arange(2), np.arange(2), None)
