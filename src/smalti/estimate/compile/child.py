"""The process that compiles; `run` starts it in a folder that holds its request.

    python -m smalti.estimate.compile.child

Reads `request.json` and `module.mlirbc` in the working directory. Writes `hlo.txt` (large constants
elided), `hlo_constants.txt` (whole), `hlo_signatures.txt` (shapes of operands instead of names) and
then `done.json`, or `failed.json`; libtpu dumps what LIBTPU_INIT_ARGS says. What it uses of jax is
private, and no public name compiles a program that was lowered elsewhere.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    stage = "start"
    try:
        request = json.loads(Path("request.json").read_text())
        from jax.experimental import topologies

        stage = "topology"
        topology = topologies.get_topology_desc(platform="tpu", topology_name=request["topology"])
        _check_devices(topology.devices, request)
        devices = _choose_devices(topology.devices, request)
        stage = "compile"
        executable = _compile(devices)
        stage = "print"
        _print(executable)
    except Exception as error:
        _write("failed.json", {"stage": stage, "type": type(error).__name__, "text": str(error)})
        raise


def _end_with_parent() -> None:
    """The other end of stdin closes when the parent ends, however it ends."""
    os.read(0, 1)  # not sys.stdin: Python aborts if that is being read when it exits
    os._exit(1)


def _check_devices(devices, request: dict) -> None:
    first = devices[0]
    found = {
        "topology_devices": len(devices),
        "device_kind": first.device_kind,
        "cores_per_device": first.num_cores,
    }
    expected = {key: request[key] for key in found}
    if found != expected:
        raise RuntimeError(f"this libtpu says {found} of it, and {expected} was expected")


def _choose_devices(devices, request: dict):
    """Devices in the order of the mesh, as jax.make_mesh lays it over the links between chips."""
    if request["devices"] == 1:
        return devices[:1]
    from jax.experimental import mesh_utils

    sizes = [size for _, size in request["axes"]]
    return mesh_utils.create_device_mesh(
        sizes, list(devices), allow_split_physical_axes=True
    ).flatten()


def _compile(devices):
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    client = devices[0].client
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array(devices)[None],
        backend=client,
    )
    with mlir.make_ir_context():
        module = ir.Module.parse(Path("module.mlirbc").read_bytes())
        main: Any = ir.SymbolTable(module.operation)["main"]
        # As jit does: what has no sharding is the compiler's choice, and every argument has one.
        build = options.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = [False] * len(main.type.inputs)
        build.allow_spmd_sharding_propagation_to_output = [
            "sdy.sharding" not in attributes for attributes in main.result_attrs
        ]
        return compiler.backend_compile_and_load(
            client, module, xla_client.DeviceList(tuple(devices)), options, []
        )


def _print(executable) -> None:
    from jax._src.lib import hlo  # pyright: ignore[reportAttributeAccessIssue]

    (module,) = executable.hlo_modules()
    options = hlo.HloPrintOptions()
    Path("hlo.txt").write_text(module.to_string(options))
    options.print_large_constants = True
    Path("hlo_constants.txt").write_text(module.to_string(options))
    options = hlo.HloPrintOptions()
    options.print_metadata = options.print_control_dependencies = False
    options.print_operand_shape, options.print_operand_names = True, False
    Path("hlo_signatures.txt").write_text(module.to_string(options))
    memory = executable.get_compiled_memory_stats()
    _write(
        "done.json",
        {
            "arguments_bytes": memory.argument_size_in_bytes,
            "outputs_bytes": memory.output_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes,
            "temporaries_bytes": memory.temp_size_in_bytes,
            "code_bytes": memory.generated_code_size_in_bytes,
        },
    )


def _write(name: str, value: dict) -> None:
    Path(name).write_text(json.dumps(value))


if __name__ == "__main__":
    main()
