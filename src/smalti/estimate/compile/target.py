"""Which TPU to compile for: a chip, or a slice of chips."""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from smalti.chips import TENSOR_CORES

# What libtpu 0.0.42 and 0.0.50 say of ahead-of-time devices; the child process checks it.
# v4 and v7x show each TensorCore as a device.
_DEVICES_PER_CHIP = {"v4": 2, "v7x": 2}
# libtpu's spelling, where it is not ours.
_LIBTPU_NAMES = {"v7x": "tpu7x"}


@dataclass(frozen=True)
class Target:
    chip: str  # "v7x"
    topology: str  # as libtpu spells it: "tpu7x:2x2x1"
    topology_devices: int
    axes: tuple[tuple[str, int], ...]  # of the mesh that the program runs on

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def device_kind(self) -> str:
        return TENSOR_CORES[self.chip].device_kind

    @property
    def cores_per_device(self) -> int:
        return TENSOR_CORES[self.chip].cores_per_device

    def mesh(self) -> AbstractMesh:
        """The mesh to trace under: Pallas and `implementation=None` read the TPU off its device."""
        names, sizes = zip(*self.axes, strict=True)
        device = AbstractDevice(
            device_kind=self.device_kind, num_cores=self.cores_per_device, platform="tpu"
        )
        return AbstractMesh(
            sizes, names, axis_types=(AxisType.Auto,) * len(names), abstract_device=device
        )


def find_target(
    chip: str, topology: str | None = None, mesh_axes: Mapping[str, int] | None = None
) -> Target:
    """The target that `compile_for`'s arguments name. Raises ValueError, with what is allowed."""
    if chip not in TENSOR_CORES:
        raise ValueError(
            f"chip {chip!r} is not known; it is one of {', '.join(TENSOR_CORES)}"
            + _suggestion(_our_name(str(chip)), TENSOR_CORES)
        )
    if topology is None:
        topology = TENSOR_CORES[chip].topology
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", topology)
    if match is None:
        raise ValueError(
            f"topology {topology!r} is not a chip and the shape of its slice: write "
            f"{chip}:2x2, or {chip}:4x4 for 16 chips"
        )
    named = _our_name(match[1])
    if named not in TENSOR_CORES:
        raise ValueError(
            f"topology {topology!r} names no chip that is known; it starts with one of "
            f"{', '.join(f'{name}:' for name in TENSOR_CORES)}" + _suggestion(named, TENSOR_CORES)
        )
    if named != chip:
        raise ValueError(
            f"topology {topology!r} is of {named}, but chip is {chip!r}: pass chip={named!r}"
        )
    chips = math.prod(int(size) for size in match[2].split("x"))
    topology_devices = chips * _DEVICES_PER_CHIP.get(chip, 1)
    topology = f"{_LIBTPU_NAMES.get(chip, chip)}:{match[2]}"
    axes = tuple((mesh_axes or {"device": 1}).items())
    wrong = [axis for axis in axes if not isinstance(axis[0], str) or not _is_size(axis[1])]
    if wrong:
        raise ValueError(
            f"mesh_axes has {wrong[0][0]!r}: {wrong[0][1]!r}; it maps names of axes to sizes of at "
            'least 1, as in {"data": 16}'
        )
    target = Target(chip, topology, topology_devices, axes)
    if target.devices not in (1, topology_devices):
        raise ValueError(
            f"mesh_axes {dict(axes)} makes {target.devices} devices, but {topology} has "
            f"{topology_devices}: use all of them, or one"
        )
    if chip == "v4" and target.devices > 1:
        raise ValueError(
            f"mesh_axes {dict(axes)} makes a slice of v4, whose devices are then whole chips of "
            "two cores, which is not modelled: leave mesh_axes out, or take another chip"
        )
    return target


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def _our_name(name: str) -> str:
    return {theirs: ours for ours, theirs in _LIBTPU_NAMES.items()}.get(name, name)


def _suggestion(name: str, names: Mapping[str, object]) -> str:
    # Exactly another spelling, or close to one.
    close = [name] if name in names else difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {close[0]}?" if close else ""
