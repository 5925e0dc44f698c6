"""Peers: other implementations of the same function, ready to be compiled and timed.

    case = AttentionCase.parse("B=1,Hq=8,Hkv=8,S=4096,D=128", mask="causal")
    for variant in attention_variants("splash", case, "forward"):
        compile_for(variant.fn, *variant.args, chip="v6e", flags=variant.flags)

Every attention takes and returns one layout, so that the transposes, padding, repeats of K and V
and scaling that a peer needs are in its program and count.
"""

from smalti.estimate.peers import flash, splash, tokamax, xla
from smalti.estimate.peers.case import AttentionCase, known
from smalti.estimate.peers.matmul import matmul_variant, xla_matmul_variant
from smalti.estimate.peers.passes import PASSES
from smalti.estimate.peers.variant import Variant

_VARIANTS = {
    "tokamax": tokamax.variants,
    "splash": splash.variants,
    "jax_flash": flash.variants,
    "xla": xla.variants,
}
ATTENTION_PEERS = tuple(_VARIANTS)


def attention_variants(peer: str, case: AttentionCase, which: str) -> list[Variant]:
    """The peer's variants of this case, the most promising first; `which` is one of PASSES.

    A case that the peer cannot do comes back as variants with `refused` set. ValueError: an unknown
    peer or pass. EstimateError: a peer that is not installed. Blocks that exceed VMEM are found
    only by compiling.
    """
    known("peer", peer, ATTENTION_PEERS, noun="peer")
    known("pass", which, PASSES, noun="pass")
    return _VARIANTS[peer](case, which)


__all__ = [
    "ATTENTION_PEERS",
    "PASSES",
    "AttentionCase",
    "Variant",
    "attention_variants",
    "matmul_variant",
    "xla_matmul_variant",
]
