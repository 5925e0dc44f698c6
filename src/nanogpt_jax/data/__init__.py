"""Text to tokens to batches: `load` a corpus or shards, then cut `Batches` from it."""

from nanogpt_jax.data.batches import Batches as Batches
from nanogpt_jax.data.batches import Position as Position
from nanogpt_jax.data.batches import validation_batches as validation_batches
from nanogpt_jax.data.dataset import Dataset as Dataset
from nanogpt_jax.data.dataset import check_fingerprint as check_fingerprint
from nanogpt_jax.data.dataset import load as load
from nanogpt_jax.data.tokenizers import Tokenizer as Tokenizer
from nanogpt_jax.data.tokenizers import from_json as tokenizer_from_json

__all__ = [
    "Batches",
    "Dataset",
    "Position",
    "Tokenizer",
    "check_fingerprint",
    "load",
    "tokenizer_from_json",
    "validation_batches",
]
