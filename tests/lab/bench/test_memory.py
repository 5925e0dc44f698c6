import sys

import pytest

from smalti.lab.bench.cases import OURS, Case
from smalti.lab.bench.memory import growth_in_fresh_process
from smalti.lab.bench.torch_peers import Unavailable

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


@linux
@pytest.mark.slow
def test_plain_softmax_grows_by_its_scores_and_ours_by_less():
    case = Case("causal", 2048, backward=True)
    scores_mib = 8 * 2048 * 2048 * 4 / 2**20
    plain = growth_in_fresh_process("plain", case, timeout_s=120)
    assert plain > scores_mib
    assert growth_in_fresh_process(OURS, case, timeout_s=120) < plain


@linux
def test_a_process_that_fails_is_named():
    with pytest.raises(Unavailable, match="ended with 1: KeyError: 'nobody'"):
        growth_in_fresh_process("nobody", Case("causal", 64), timeout_s=120)
