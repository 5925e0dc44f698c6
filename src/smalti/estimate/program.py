"""A compiled program, as data: what the TPU compiler wrote about it, before anything is read."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class KernelDump:
    """What the compiler dumped for one op of the schedule; the texts are libtpu's files, whole."""

    op: str  # the HLO instruction's name, without its %: "flash_attention.1"
    bundles: str  # *-final_bundles.txt
    utilization: str  # *-final_hlo-static-per-bundle-utilization.txt


@dataclass(frozen=True)
class Memory:
    """What `compiled.memory_analysis()` says, of one device; bytes of HBM."""

    arguments_bytes: int
    outputs_bytes: int
    aliased_bytes: int
    temporaries_bytes: int
    code_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments, results that are not arguments, temporaries and code, all live at once."""
        return (
            self.arguments_bytes
            + self.outputs_bytes
            - self.aliased_bytes
            + self.temporaries_bytes
            + self.code_bytes
        )


@dataclass(frozen=True)
class Program:
    """A function compiled for a TPU that need not be there. Everything is text or numbers."""

    name: str  # of the function
    chip: str  # "v6e"
    topology: str  # "v6e:2x2"
    devices: int  # that the program runs on
    flags: tuple[str, ...]  # of libtpu, beyond those that write the dumps
    versions: dict[str, str]  # jax, jaxlib, libtpu, python
    hlo: str  # the scheduled HLO module, large constants printed
    memory: Memory
    kernels: dict[str, KernelDump] = field(default_factory=dict)  # by op name, Pallas kernels only
    xla_ops: dict[str, KernelDump] = field(default_factory=dict)  # of XLA's own operations
    cached: bool = False  # read from the cache, not compiled now
