"""A jittable function, compiled by the real TPU compiler for a TPU that need not be there.

    program = compile_for(fn, jax.ShapeDtypeStruct((4096, 4096), "bfloat16"), chip="v6e")

Lowered in this process, without libtpu; compiled in a child of it, because the compiler reads its
flags once in a process and may abort it; cached on disk.
"""

from smalti.estimate.compile.api import compile_for

__all__ = ["compile_for"]
