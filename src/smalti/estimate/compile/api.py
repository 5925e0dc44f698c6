"""`compile_for`: the way in."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from smalti.estimate.compile import cache
from smalti.estimate.compile.dumps import DUMP_FLAGS
from smalti.estimate.compile.lowering import lower
from smalti.estimate.compile.run import run_compiler
from smalti.estimate.compile.target import find_target
from smalti.estimate.errors import CompilerMissing
from smalti.estimate.program import Program


def compile_for(
    fn: Callable[..., Any],
    *args: Any,
    chip: str = "v6e",
    topology: str | None = None,
    mesh_axes: Mapping[str, int] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    flags: Sequence[str] = (),
    donate: Sequence[int] = (),
    cache_dir: str | os.PathLike[str] | None = None,
    timeout_s: float = 1800.0,
) -> Program:
    """Compile `fn(*args)` with the real TPU compiler, on a machine without a TPU.

    `args` are pytrees of jax.ShapeDtypeStruct, or of arrays, of which only shape and dtype count.
    The function is traced in a mesh of TPUs, so Pallas and `implementation=None` choose as they
    would there.

    chip: "v4", "v5e", "v5p", "v6e" or "v7x". Without `mesh_axes` the program runs on one device:
        half a chip, that is one TensorCore, of v4 and v7x; a whole chip of the others, which on v5p
        has two TensorCores.
    topology: the slice, "v6e:4x4"; None for the chip's smallest.
    mesh_axes: names and sizes of the mesh over all its devices, {"data": 16}.
    in_shardings, out_shardings: jax.sharding.PartitionSpec, or pytrees of them, as prefixes of the
        arguments (a tuple) and the result. None: arguments are replicated, and the compiler
        chooses for results.
    flags: of libtpu, such as "--xla_tpu_scoped_vmem_limit_kib=65536". LIBTPU_INIT_ARGS and
        XLA_FLAGS of the environment are not taken over.
    donate: numbers of the arguments whose memory the results may take.
    cache_dir: where compiled programs are kept; None for $SMALTI_CACHE, else smalti in
        $XDG_CACHE_HOME or ~/.cache.
    timeout_s: after how many seconds the compiler is stopped.

    Raises ValueError for a wrong argument, CompilerMissing without libtpu, CompileFailed where the
    compiler refuses the program, dies or takes too long, and what `fn` raises while it is traced.
    A cache that cannot be written is a warning.
    """
    target = find_target(chip, topology, mesh_axes)
    flags = _checked_flags(flags)
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s!r}; it must be a positive number of seconds")
    versions = _versions()
    lowered = lower(fn, args, target, in_shardings, out_shardings, donate)
    folder = cache.cache_folder(cache_dir)
    # Shardings and donation are in the module; chip and devices are not, where there is one.
    key = cache.cache_key(
        lowered.module,
        topology=target.topology,
        axes=target.axes,
        flags=flags,
        versions=versions,
    )
    compiled = cache.load(folder, key)
    cached = compiled is not None
    if compiled is None:
        compiled = run_compiler(lowered.module, target, flags, timeout_s, versions)
        cache.store(folder, key, compiled)
    return Program(
        name=lowered.name,
        chip=target.chip,
        topology=target.topology,
        devices=target.devices,
        flags=flags,
        versions=versions,
        hlo=compiled.hlo,
        memory=compiled.memory,
        kernels=compiled.kernels,
        xla_ops=compiled.xla_ops,
        cached=cached,
    )


def _checked_flags(flags: Sequence[str]) -> tuple[str, ...]:
    if isinstance(flags, str):
        raise ValueError(f"flags is the string {flags!r}; it is a sequence of them: ({flags!r},)")
    ours = {flag.partition("=")[0] for flag in DUMP_FLAGS}
    for flag in flags:
        if not isinstance(flag, str) or not flag.startswith("--") or len(flag.split()) != 1:
            raise ValueError(
                f"flags holds {flag!r}; each is one flag of libtpu without spaces, such as "
                "'--xla_tpu_scoped_vmem_limit_kib=65536'"
            )
        if flag.partition("=")[0] in ours:
            raise ValueError(f"flags holds {flag!r}, which compile_for sets itself: leave it out")
    return tuple(flags)


def _versions() -> dict[str, str]:
    try:
        libtpu = metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        raise CompilerMissing(
            'libtpu, the TPU compiler, is not installed: pip install "jax[tpu]" (Linux on x86-64; '
            "no TPU is needed)"
        ) from None
    return {
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
        "libtpu": libtpu,
        "python": platform.python_version(),
    }
