"""Facts about accelerators, with their sources; whoever needs a peak rate reads it here.

TPU rows: `jax/_src/tpu_info.py` (jax 0.10.2), per chip. GPU rows: NVIDIA's data sheets of the SXM
boards, dense (without 2:4 sparsity).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One chip; rates are per second, sizes in bytes."""

    name: str
    device_kinds: tuple[str, ...]  # what `jax.Device.device_kind` starts with
    devices: int  # how many jax devices a chip shows
    bf16_flops_per_s: float
    hbm_bytes: float
    hbm_bytes_per_s: float


CHIPS = (
    Chip("TPU v4", ("TPU v4",), 1, 2.75e14, 34.4e9, 1.23e12),
    Chip("TPU v5e", ("TPU v5 lite", "TPU v5e"), 1, 1.97e14, 17.2e9, 8.20e11),
    Chip("TPU v5p", ("TPU v5",), 1, 4.59e14, 103e9, 2.46e12),
    Chip("TPU v6e", ("TPU v6 lite", "TPU v6e"), 1, 9.20e14, 34.4e9, 1.64e12),
    Chip("TPU v7x", ("TPU7x", "TPU v7x"), 2, 2.31e15, 206e9, 7.40e12),
    # A100 data sheet, June 2021; H100 data sheet, 2023; H200 data sheet, 2024.
    Chip("A100", ("NVIDIA A100-SXM4-40GB",), 1, 3.12e14, 40e9, 1.555e12),
    Chip("A100 80GB", ("NVIDIA A100-SXM4-80GB",), 1, 3.12e14, 80e9, 2.039e12),
    Chip("H100", ("NVIDIA H100 80GB HBM3",), 1, 9.895e14, 80e9, 3.35e12),
    Chip("H200", ("NVIDIA H200",), 1, 9.895e14, 141e9, 4.8e12),
)


def find_chip(device_kind: str) -> Chip | None:
    """The chip behind a `jax.Device.device_kind`, or None where it is not known (a CPU, say).

    >>> find_chip("TPU v6 lite").name
    'TPU v6e'
    """
    matches = [
        (len(kind), chip)
        for chip in CHIPS
        for kind in chip.device_kinds
        if device_kind.startswith(kind)
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def peak_flops_per_s(device_kind: str) -> float | None:
    """bfloat16 FLOP/s of one jax device, or None where it is not known."""
    chip = find_chip(device_kind)
    return None if chip is None else chip.bf16_flops_per_s / chip.devices


@dataclass(frozen=True)
class TensorCore:
    """What the time of a schedule depends on, of one TensorCore, the unit that runs a kernel.

    `TENSOR_CORE_SOURCES` says of every field where its values are from.
    """

    chip: str
    device_kind: str
    topology: str  # the smallest that libtpu compiles for
    clock_hz: float
    hbm_bytes_per_s: float  # half the chip's where two cores share it
    granule_bytes: int  # the unit of a copy's size
    branch_delay_slots: int
    packs_empty_slots: bool  # writes one bundle for several empty slots
    mxu_rows_per_cycle: int  # of a product's left operand, in each MXU
    mxus: int
    mxu_side: int  # of the square of weights that it holds
    mxu_doubles: tuple[str, ...] = ()  # types that it multiplies at twice that rate
    cores_per_device: int = 1  # that share a kernel and the HBM
    address_bytes: int = 32  # the unit of an address in HBM
    mxu_push_share: float = 0.34  # of a product's rows' time, what a weight's rows take
    dma_latency_s: float = 530e-9  # from a copy's last byte in HBM's pipe to its sync flag

    @property
    def hbm_bytes_per_cycle(self) -> float:
        return self.hbm_bytes_per_s / self.clock_hz

    @property
    def device_hbm_bytes_per_cycle(self) -> float:
        """Of all the cores that one jax device is."""
        return self.hbm_bytes_per_cycle * self.cores_per_device

    @property
    def dma_latency_cycles(self) -> float:
        return self.dma_latency_s * self.clock_hz


_PEAK = "jax/_src/tpu_info.py (jax 0.10.2)"
_DUMPS = "read off the final bundles that libtpu 0.0.42 and 0.0.50 write for the chip"
_FITTED = "fitted on published times, the same for every chip: `smalti estimate calibrate`"
TENSOR_CORE_SOURCES = {
    "device_kind": "libtpu's ahead-of-time devices (jax.experimental.topologies)",
    "topology": "the same",
    "clock_hz": "libtpu 0.0.42, which compiles `pl.delay`, of nanoseconds, to so many cycles; the "
    "peak rate implies the same on v4 to v6e, but 2.2 GHz on v7x",
    "hbm_bytes_per_s": _PEAK,
    "granule_bytes": _DUMPS + ": copies of blocks of known size",
    "address_bytes": _DUMPS + ": how far apart the blocks of an array are",
    "branch_delay_slots": _DUMPS + ": where regions end behind branches",
    "packs_empty_slots": _DUMPS,
    "mxu_rows_per_cycle": _PEAK + ": bf16 FLOP/s over clock and MXUs; 1 of 128² on v4, v5e and "
    "v5p, 2 of 256² on v6e and v7x",
    "mxus": "jax/_src/tpu_info.py (jax 0.10.2), and the MXUs that the bundles name",
    "mxu_side": "the same",
    "mxu_doubles": _PEAK + ": int8 on v5e, v5p and v6e and float8 on v7x have twice bf16's peak; "
    "no published time of such a kernel is known",
    "cores_per_device": "libtpu's ahead-of-time devices",
    "mxu_push_share": _FITTED,
    "dma_latency_s": _FITTED,
}

_INT8 = ("s8", "u8")
TENSOR_CORES = {
    core.chip: core
    for core in (
        TensorCore(
            "v4", "TPU v4", "v4:2x2x1", 1.05e9, 1.23e12 / 2, 512, 1, False, 1, 4, 128, (), 1, 512
        ),
        TensorCore(
            "v5e", "TPU v5 lite", "v5e:2x2", 1.5e9, 8.20e11, 32, 4, False, 1, 4, 128, _INT8, 1, 512
        ),
        TensorCore(
            "v5p", "TPU v5", "v5p:2x2x1", 1.75e9, 2.46e12 / 2, 32, 4, False, 1, 4, 128, _INT8, 2
        ),
        TensorCore(
            "v6e", "TPU v6 lite", "v6e:2x2", 1.75e9, 1.64e12, 32, 4, False, 2, 2, 256, _INT8
        ),
        TensorCore(
            "v7x", "TPU7x", "tpu7x:2x2x1", 1.9e9, 7.40e12 / 2, 32, 6, True, 2, 2, 256, ("f8",)
        ),
    )
}
