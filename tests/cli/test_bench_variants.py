import dataclasses

import pytest

from smalti.cli.bench_variants import DIMS, published
from smalti.estimate.peers import AttentionCase, attention_variants
from tests.estimate.peers.support import lower
from tests.support.tokamax import needs_tokamax

PEERS = [pytest.param("tokamax", marks=needs_tokamax), "splash", "jax_flash"]
PASSES = ("forward", "both")


def case(dim, length=4096, heads=8):
    return AttentionCase.parse(f"B=1,Hq=8,Hkv={heads},S={length},D={dim}")


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("peer", PEERS)
def test_they_are_few_and_differ(peer, which):
    for dim in DIMS:
        names = [variant.name for variant in published(peer, case(dim), which)]
        assert 1 <= len(set(names)) == len(names) <= 4


@pytest.mark.parametrize("peer", PEERS)
def test_they_name_blocks_as_the_peers_own_grid_does(peer):
    for which in PASSES:
        grid = [set(variant.blocks) for variant in attention_variants(peer, case(128), which)]
        for variant in published(peer, case(128), which):
            assert set(variant.blocks) in grid


@pytest.mark.parametrize("peer", PEERS)
def test_a_short_sequence_clips_them(peer):
    for which in PASSES:
        short = published(peer, case(128, length=256), which)
        sizes = [size for variant in short for size in variant.blocks.values()]
        assert max(size for size in sizes if type(size) is int) == 256
        names = [variant.name for variant in short]
        assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("peer", PEERS)
def test_they_lower_for_a_tpu(peer, which, dim):
    small = dataclasses.replace(case(dim, length=2048, heads=1), Hq=2)
    for variant in published(peer, small, which):
        assert lower(variant).mlir_module().count("tpu_custom_call") > 0
