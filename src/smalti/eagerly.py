"""Values that are needed while a program is being traced, maybe for a machine that is not here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np


def eagerly(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, computed now, with NumPy arrays as results.

    No argument may be traced. JAX keeps what is being traced, and the mesh for which, by thread: in
    one of its own `function` runs here and now. (`jax.ensure_compile_time_eval` runs it on the mesh
    in context, which a program that is compiled for a TPU from elsewhere does not have.)
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: jax.tree.map(np.asarray, function(*arguments))).result()
