"""The launches of kernels that attention consists of, and what each makes."""

from typing import Literal

Launch = Literal["forward", "backward", "backward_dq", "backward_dk_dv", "bias_gradient"]
# What a launch of the backward makes.
MAKES: dict[Launch, tuple[str, ...]] = {
    "backward": ("dq", "dk", "dv"),
    "backward_dq": ("dq",),
    "backward_dk_dv": ("dk", "dv"),
}
# The operands of ``score_mod`` whose gradients a launch makes: those whose steps are neighbours.
MAKES_OF_MOD: dict[Launch, tuple[str, ...]] = {
    "backward": ("number", "q", "kv", "relative"),
    "backward_dq": ("number", "q", "relative"),
    "backward_dk_dv": ("kv",),
}
# The axes whose steps add to one block of such a gradient, for each query head.
SUMMED_OVER = {"number": ("i", "j"), "q": ("j",), "kv": ("i",), "relative": ("i", "j")}
