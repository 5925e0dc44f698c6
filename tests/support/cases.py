"""What the contract suite sweeps: sizes, masks and features, by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

from smalti import masks
from tests.support.inputs import Sizes, normal

SIZES = {
    "300x300": Sizes(1, 300, 300, 4, 2, 16, 16),
    "127x129 D8 Dv24": Sizes(2, 127, 129, 2, 2, 8, 24),
    "129x127 MQA D7 Dv5": Sizes(2, 129, 127, 3, 1, 7, 5),
    "1x300": Sizes(2, 1, 300, 4, 2, 16, 16),
    "300x17": Sizes(1, 300, 17, 2, 1, 16, 8),
    "2x128": Sizes(3, 2, 128, 6, 2, 1, 1),
    "128x2": Sizes(1, 128, 2, 2, 2, 33, 16),
    "1x1": Sizes(2, 1, 1, 2, 1, 4, 4),
}


def _rng(sizes: Sizes):
    return np.random.default_rng([sizes.Sq, sizes.Sk, 7])


def _ids(sizes: Sizes, side: str, low: int = 0) -> np.ndarray:
    """Packed documents; with ``low=-1`` padding before, between and after them."""
    length = sizes.Sq if side == "q" else sizes.Sk
    ids = _rng(sizes).integers(low, 4, (sizes.B, length)).astype(np.int32)
    return np.sort(ids, 1) if low == 0 else ids


def _block_mask(sizes: Sizes):
    return masks.build_block_mask(
        masks.streaming(sinks=3, window=40), *sizes.scores, block_q=64, block_kv=32
    )


# Each: sizes → arguments of `smalti.attention`.
MASKS: dict[str, Callable[[Sizes], dict]] = {
    "none": lambda s: {},
    "causal": lambda s: {"mask": masks.causal()},
    "causal top-left": lambda s: {"mask": masks.causal(offset=0)},
    "causal, empty rows": lambda s: {"mask": masks.causal(offset=-5)},
    "sliding_window": lambda s: {"mask": masks.sliding_window(19)},
    "local": lambda s: {"mask": masks.local(9, 4)},
    "streaming": lambda s: {"mask": masks.streaming(sinks=4, window=33)},
    "prefix_lm": lambda s: {"mask": masks.prefix_lm(np.arange(s.B, dtype=np.int32) * 11 + 3)},
    "document": lambda s: {"mask": masks.document((_ids(s, "q"), _ids(s, "k")))},
    "lengths": lambda s: {
        "mask": masks.lengths(
            q=np.maximum(s.Sq - 40 * np.arange(s.B), 0),
            kv=np.maximum(s.Sk - 70 * np.arange(s.B), 0),
        )
    },
    "mask_mod": lambda s: {"mask": lambda b, h, q_idx, kv_idx: (q_idx + 2 * kv_idx + h) % 3 == b},
    "array": lambda s: {"mask": _rng(s).random(s.scores) < 0.4},
    "combination": lambda s: {
        "mask": (masks.causal() & ~masks.local(3, 0)) | masks.sliding_window(2)
    },
    "BlockMask": lambda s: {"mask": _block_mask(s)},
    "segment_ids, padded": lambda s: {"segment_ids": (_ids(s, "q", -1), _ids(s, "k", -1))},
    "segment_ids and causal": lambda s: {
        "mask": masks.causal(),
        "segment_ids": (_ids(s, "q"), _ids(s, "k")),
    },
}


def per_head(score, b, h, q_idx, kv_idx, weight):
    return score * weight[h]


def relative(score, b, h, q_idx, kv_idx, table, temperature):
    """A relative bias ``[Sq + Sk − 1]`` and a learned scalar."""
    return score * temperature + table[q_idx - kv_idx + (table.shape[0] - 1) // 2]


def by_key(score, b, h, q_idx, kv_idx, weight, kind):
    """Does not read the score; captures floats ``[B, Sk]`` and integers ``[Sk]``."""
    return weight[b, kv_idx] * (1 + kind[kv_idx])


def _relative(s: Sizes) -> dict:
    length = 2 * max(s.Sq, s.Sk) - 1
    return {
        "score_mod": relative,
        "captured": (normal(length, seed="table"), np.float32(1.3).reshape(())),
    }


FEATURES: dict[str, Callable[[Sizes], dict]] = {
    "plain": lambda s: {},
    "softcap, scale": lambda s: {"softcap": 1.5, "scale": 0.7},
    "sinks": lambda s: {"sinks": normal(s.Hq, seed="sinks")},
    "bias": lambda s: {"bias": normal(*s.scores, seed="bias")},
    "score_mod per head": lambda s: {
        "score_mod": per_head,
        "captured": (normal(s.Hq, seed="weight"),),
    },
    "score_mod relative": _relative,
    "score_mod by key": lambda s: {
        "score_mod": by_key,
        "captured": (normal(s.B, s.Sk, seed="weight"), np.arange(s.Sk, dtype=np.int32) % 3),
    },
    "all but score_mod": lambda s: {
        "softcap": 4.0,
        "scale": 0.4,
        "sinks": normal(s.Hq, seed="sinks"),
        "bias": normal(1, s.Hq, 1, s.Sk, seed="bias"),
    },
    "all": lambda s: FEATURES["all but score_mod"](s) | _relative(s),
}


def spread(*lists, times: int) -> Iterator[tuple]:
    """``times`` tuples for each entry of the first list, walking the others at different paces, so
    that pairs of them are covered evenly by few cases."""
    first, *others = map(list, lists)
    walkers = [itertools.cycle(x) for x in others]
    for entry in first:
        for _ in range(times):
            yield (entry, *map(next, walkers))
        next(walkers[-1])


def hidden_by_log(score, b, h, q_idx, kv_idx, weight):
    """NaN, with NaN derivatives, above the diagonal; −inf with an infinite derivative on every
    seventh key."""
    gap = jnp.where(kv_idx <= q_idx, 1.0 + q_idx - kv_idx, jnp.nan)
    kept = jnp.where(kv_idx % 7 == 3, 0.0, 1.0)
    return score * weight[h] - 0.1 * jnp.log(gap) + jnp.log(kept)
