"""What happens to Q, K and V between their projections and attention, in one step."""

from .api import qk_norm_rope as qk_norm_rope

__all__ = ["qk_norm_rope"]
