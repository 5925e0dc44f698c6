"""Masks: a catalogue, combinators (``&``, ``|``, ``~``), and the tiles that they leave alive.

The catalogue: `full`, `causal`, `sliding_window`, `local`, `streaming`, `prefix_lm`, `document`,
`lengths`; `parse` makes one of a text such as ``"causal() & prefix_lm(4)"``. In a causal mask and
those made of it the last query meets the last key, unless ``offset`` says otherwise. A mask of
your own is a function ``mask_mod(b, h, q_idx, kv_idx)``.
"""

from smalti.masks.block_mask import BlockMask as BlockMask
from smalti.masks.block_mask import build_block_mask as build_block_mask
from smalti.masks.catalogue import causal as causal
from smalti.masks.catalogue import document as document
from smalti.masks.catalogue import full as full
from smalti.masks.catalogue import lengths as lengths
from smalti.masks.catalogue import local as local
from smalti.masks.catalogue import prefix_lm as prefix_lm
from smalti.masks.catalogue import sliding_window as sliding_window
from smalti.masks.catalogue import streaming as streaming
from smalti.masks.count import Counts as Counts
from smalti.masks.count import count as count
from smalti.masks.mask_mod import Mask as Mask
from smalti.masks.parse import parse as parse
from smalti.masks.runs import TileRuns as TileRuns
from smalti.masks.show import draw as draw
from smalti.masks.show import show as show
