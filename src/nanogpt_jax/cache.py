"""Which cache a model's attention leaves to sample with: some first tokens, and the last ones.

`smalti.decode.RingBuffer` keeps what `streaming(sinks=K, window=W)` lets a query see. Without sink
tokens that is a sliding window, and with a window as long as the training's sequences it is causal
attention, for as long as such a sequence.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

import smalti.masks
from nanogpt_jax.config import Config


@dataclass(frozen=True)
class CacheSizes:
    """How many first and how many last tokens are kept, the query's own among the latter."""

    sinks: int
    window: int

    def __str__(self) -> str:
        first = f"the first {self.sinks} and " if self.sinks else ""
        return f"{first}the last {self.window} tokens"


def cache_sizes(config: Config) -> CacheSizes | None:
    """What to keep of each layer's keys and values; None: such a mask needs more than that.

    Never more than `training.seq_len` tokens: no farther apart were they when the model learnt.
    """
    S = config.training.seq_len
    if config.attention.impl != "streaming":
        return sizes_of_mask(config.attention.mask_text, S)
    # By its numbers: in a mask of S tokens the sink tokens would not show if the window has all.
    sinks, window = config.attention.streaming_sizes
    sinks = min(sinks, S - 1)
    return CacheSizes(sinks, min(window, S - sinks))


def sizes_of_mask(mask_text: str, S: int, rows: int = 1024) -> CacheSizes | None:
    """The K and W with which `streaming` is this mask in all of its S² pairs, if there are any.

    So `local(3, 0)` is a window of 4, however it is written.
    """
    mask = smalti.masks.parse(mask_text).bind(1, 1, S, S)
    keys = np.arange(S)[None, :]

    def visible(mask, queries):
        seen = np.asarray(mask(0, 0, jnp.asarray(queries), jnp.asarray(keys)))
        return np.broadcast_to(seen, (len(queries), S))

    (hidden,) = np.nonzero(~visible(mask, np.array([[S - 1]]))[0])
    first, last = (hidden[0], hidden[-1]) if len(hidden) else (0, -1)
    sizes = CacheSizes(int(first), int(S - 1 - last))
    if not sizes.window:
        return None
    kept = smalti.masks.streaming(sinks=sizes.sinks, window=sizes.window).bind(1, 1, S, S)
    for start in range(0, S, rows):
        queries = np.arange(start, min(start + rows, S))[:, None]
        if not np.array_equal(visible(mask, queries), visible(kept, queries)):
            return None
    return sizes
