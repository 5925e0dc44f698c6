"""Attention for JAX that knows what a mask leaves out."""

from smalti import decode as decode
from smalti import masks as masks
from smalti.attention.api import attention as attention
from smalti.attention.api import explain_choice as explain_choice
from smalti.attention.block_sizes import BlockSizes as BlockSizes
from smalti.attention.dot_product_attention import (
    dot_product_attention as dot_product_attention,
)
from smalti.attention.flex import flex_pallas_attention as flex_pallas_attention
from smalti.masks import BlockMask as BlockMask
from smalti.masks import build_block_mask as build_block_mask
