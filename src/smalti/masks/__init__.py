"""Masks: a catalogue, combinators (``&``, ``|``, ``~``), and the tiles that they leave alive."""

from smalti.masks.block_mask import BlockMask as BlockMask
from smalti.masks.block_mask import TileRuns as TileRuns
from smalti.masks.block_mask import build_block_mask as build_block_mask
from smalti.masks.catalogue import causal as causal
from smalti.masks.catalogue import document as document
from smalti.masks.catalogue import full as full
from smalti.masks.catalogue import lengths as lengths
from smalti.masks.catalogue import local as local
from smalti.masks.catalogue import prefix_lm as prefix_lm
from smalti.masks.catalogue import sliding_window as sliding_window
from smalti.masks.catalogue import streaming as streaming
from smalti.masks.mask_mod import Mask as Mask
from smalti.masks.parse import parse as parse
