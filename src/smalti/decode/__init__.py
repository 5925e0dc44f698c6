"""Decoding with a cache of the first and the last tokens: StreamingLLM's ring buffer."""

from .api import append as append
from .api import attend as attend
from .ring_buffer import RingBuffer as RingBuffer
