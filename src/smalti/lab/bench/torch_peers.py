"""What PyTorch users have: SDPA and the compiled flex_attention, on the CPU.

As in `jax_peers`, a call returns `out` or `(out, dq, dk, dv)`; here `[B, H, S, D]`, the layout
that PyTorch asks for. Inputs are converted once, outside what is timed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from smalti.lab.bench.cases import Case, Inputs, visible
from smalti.lab.bench.cpu import usable_cores


class Unavailable(Exception):
    """A peer cannot run here; the text says why."""


def build(name: str, case: Case, inputs: Inputs) -> Callable[[], Any]:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Unavailable(f"PyTorch is not installed ({error})") from error

    torch.set_num_threads(usable_cores())
    dtype = getattr(torch, case.dtype)
    arrays = (inputs.q, inputs.k, inputs.v, inputs.dout)
    q, k, v, dout = (
        torch.from_numpy(np.ascontiguousarray(x.transpose(0, 2, 1, 3))).to(dtype) for x in arrays
    )
    attend = {"torch.sdpa": _sdpa, "torch.flex": _flex}[name](torch, case, inputs)

    if not case.backward:

        def forward():
            with torch.no_grad():
                return attend(q, k, v)

        return forward

    for x in (q, k, v):
        x.requires_grad_()

    def forward_backward():
        out = attend(q, k, v)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    return forward_backward


def _sdpa(torch, case: Case, inputs: Inputs):
    attention = torch.nn.functional.scaled_dot_product_attention
    if case.mask == "causal":
        return lambda q, k, v: attention(q, k, v, is_causal=True)
    i = torch.arange(case.S)
    seen = visible(case.mask, i[:, None], i[None, :], torch.from_numpy(inputs.ids))
    return lambda q, k, v: attention(q, k, v, attn_mask=seen)


def _flex(torch, case: Case, inputs: Inputs):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # pyright: ignore[reportMissingImports]

    ids = torch.from_numpy(inputs.ids)
    block_mask = create_block_mask(
        lambda b, h, i, j: visible(case.mask, i, j, ids), None, None, case.S, case.S, device="cpu"
    )
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def to_numpy(result, case: Case) -> list[np.ndarray]:
    """float32 `[B, S, H, D]`, to compare with what the JAX side returns."""
    tensors = result if case.backward else (result,)
    return [x.float().transpose(1, 2).numpy() for x in tensors]
