import pytest

from smalti.cli.bench_cases import OURS, PEERS, Asked, shapes, tasks
from tests.support.tokamax import needs_tokamax

SMALL = {"chips": ("v6e",), "dims": (128,), "lengths": (2048,), "kv_heads": (8,)}


def test_every_shape_of_the_comparison_is_there_once():
    found = list(shapes(Asked()))
    assert len(set(found)) == len(found) == 3 * 2 * 3 * 3 * 2
    assert {(s.case.Hkv, s.case.D, s.case.Sq) for s in found} == {
        (h, d, s) for h in (8, 2) for d in (64, 128, 256) for s in (2048, 4096, 8192)
    }
    assert {(s.case.dtype, s.case.mask, s.case.Hq, s.case.B) for s in found} == {
        ("bfloat16", "causal", 8, 1)
    }


@needs_tokamax
def test_ours_and_every_peer_get_the_same_flags():
    listed = tasks(Asked(**SMALL, passes=("forward",)))
    assert list(dict.fromkeys(task.variant.peer for task in listed)) == [OURS, *PEERS]
    assert {task.variant.flags for task in listed} == {("--xla_tpu_scoped_vmem_limit_kib=32768",)}


@needs_tokamax
def test_parts_of_the_variants():
    def count(**options):
        peers = [task.variant.peer for task in tasks(Asked(**SMALL, **options))]
        return {peer: peers.count(peer) for peer in PEERS}

    assert set(count(variants=1).values()) == {2}  # one of each pass
    some, all_of_them = count(), count(full_grid=True)
    assert all(2 <= some[peer] < all_of_them[peer] for peer in PEERS)


@pytest.mark.parametrize("dim", [80, 192])
def test_other_head_dims_have_the_full_grid_alone(dim):
    with pytest.raises(ValueError, match=rf"--dims: {dim} is none of .*--full-grid takes any"):
        Asked(dims=(dim,))
    assert Asked(dims=(dim,), full_grid=True).dims == (dim,)
