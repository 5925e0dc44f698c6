"""The texts are what libtpu 0.0.42 and 0.0.50 printed, cut to what matters."""

import pytest

from smalti.estimate.compile.failures import explain
from smalti.estimate.errors import CompileFailed, CompilerMissing, EstimateError

from .kernels import v6e

VERSIONS = {"jax": "0.10.2", "libtpu": "0.0.42.1"}
NOISE = (
    "WARNING: Logging before InitGoogle() is written to STDERR\n"
    "E0000 00:00:1795980815.143164 9867 common_lib.cc:554] INVALID_ARGUMENT: Error: unexpected "
    "worker hostname 'WARNING: could not determine TPU worker hostnames or IP addresses'\n"
)


def explained(text="", stage="compile", type="JaxRuntimeError", stderr="", returncode=1):
    failed = {"stage": stage, "type": type, "text": text} if stage else {}
    return explain(v6e(), VERSIONS, failed, NOISE + stderr, returncode)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory "
            "space vmem while allocating on stack for %k.1 = f32[65536,1024]{1,0:T(8,128)} "
            'custom-call(%x.1), custom_call_target="tpu_custom_call". Scoped allocation with size '
            "64.00M and limit 32.00M exceeded scoped vmem limit by 32.00M. It should not be",
            "VMEM of k.1 is exhausted on v6e: the kernel needs 64.00M and its limit is 32.00M; "
            "take smaller blocks, or raise the limit with "
            "flags=('--xla_tpu_scoped_vmem_limit_kib=65536',) if the chip has that much",
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space vmem. Used 128.00M of 127.94M vmem. Exceeded vmem capacity by 64.0K.",
            "VMEM is exhausted on v6e: 128.00M are needed and the chip has 127.94M; take smaller "
            "blocks or scratch",
        ),
        (
            "RESOURCE_EXHAUSTED: Allocation (size=16777216) would exceed memory (size=1048576) :: "
            "#allocation3 [shape = 'u8[16777216]{0}', space=smem, size = 0x1000000, scoped, tag = "
            "'prefetched SMEM operand 0'] :: k.1",
            "SMEM of k.1 is exhausted on v6e: prefetched SMEM operand 0 needs 16777216 bytes and "
            "there are 1048576; pass a smaller array there",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (144.00G) exceeds available HBM (31.25G).",
            "HBM of v6e is exhausted: 144.00G are needed and 31.25G are there; take a smaller "
            "batch, recompute with jax.checkpoint, donate arguments, or spread it over more chips",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.10G of 31.25G hbm.",
            "HBM of v6e is exhausted: 40.10G are needed and 31.25G are there; take a smaller "
            "batch, recompute with jax.checkpoint, donate arguments, or spread it over more chips",
        ),
        (
            "INTERNAL: Mosaic failed to compile TPU kernel: Invalid vector type for load\n\nat "
            'location: loc("get:"("get/get"(callsite("kernel"("/home/me/k.py":46:40 to :50)))))',
            "Mosaic, the compiler of Pallas kernels, refuses a kernel on v6e at /home/me/k.py, "
            "line 46: Invalid vector type for load; write that part of the kernel another way",
        ),
        (
            "INTERNAL: Mosaic failed to compile TPU kernel with MLIR module name `kernel` HLO name "
            "`k.1`: Not implemented: Multiple source vregs along gather dimension",
            "Mosaic, the compiler of Pallas kernels, refuses k.1 on v6e: Not implemented: Multiple "
            "source vregs along gather dimension; write that part of the kernel another way",
        ),
        (
            "INTERNAL: something new\nand more",
            "the compiler refuses the program on v6e: INTERNAL: something new",
        ),
    ],
)
def test_a_refusal_is_one_line_and_its_whole_text_is_kept(text, line):
    error = explained(text)
    assert type(error) is CompileFailed
    assert str(error) == line
    assert text in error.compiler_message
    assert NOISE.strip() in error.compiler_message


@pytest.mark.parametrize(
    ("arguments", "kind", "line"),
    [
        (
            {"stage": "", "stderr": "ERROR: Unknown command line flag 'xla_tpu_no_such'"},
            ValueError,
            "flags holds --xla_tpu_no_such, which libtpu 0.0.42.1 does not know; correct it or "
            "leave it out",
        ),
        (
            {"stage": "", "stderr": "ERROR: Illegal value 'abc' specified for flag 'xla_kib'"},
            ValueError,
            "flags gives --xla_kib the value 'abc', which libtpu 0.0.42.1 refuses",
        ),
        (
            {
                "stage": "topology",
                "text": 'INVALID_ARGUMENT: Topology layout "v6e:3x3" is not divisible',
            },
            ValueError,
            "libtpu 0.0.42.1 refuses the topology v6e:2x2 (INVALID_ARGUMENT: Topology layout "
            '"v6e:3x3" is not divisible); a slice is made of whole hosts, mostly of 2x2 chips: try '
            "2x2, 2x4, 4x4 or 8x8 (v4, v5p and v7x: 2x2x1, 2x2x2 or 4x4x4)",
        ),
        (
            {
                "stage": "topology",
                "text": "INTERNAL: Failed to open libtpu.so: invalid ELF header",
            },
            CompilerMissing,
            "libtpu 0.0.42.1 is installed but does not load here (INTERNAL: Failed to open "
            "libtpu.so: invalid ELF header); it is built for Linux on x86-64: reinstall it there "
            'with pip install "jax[tpu]"',
        ),
        (
            {"stage": "print", "type": "AttributeError", "text": "no attribute 'hlo_modules'"},
            CompileFailed,
            "jax 0.10.2 with libtpu 0.0.42.1 does not work as the tested versions do (print: "
            "AttributeError: no attribute 'hlo_modules'); tested are jax 0.10.2 with libtpu "
            "0.0.42.1, and jax 0.12.0.1 with libtpu 0.0.50.1",
        ),
        (
            {
                "stage": "",
                "returncode": -6,
                "stderr": "F1129 19:54:08.2 26833 layout.cc:70] Check failed: rank == 2 (1 vs. 2)\n"
                "*** Check failure stack trace: ***\n    @ 0x7f0 (unknown)\n",
            },
            CompileFailed,
            "the compiler died of SIGABRT while compiling for v6e (Check failed: rank == 2 (1 vs. "
            "2)); that is a fault of libtpu 0.0.42.1, which some gathers in kernels set off: leave "
            "parts of the function out until it compiles, and write that part another way",
        ),
        (
            {"stage": "", "returncode": -9},
            CompileFailed,
            "the compiler died of SIGKILL while compiling for v6e; something stopped it, mostly a "
            "machine that ran out of memory: free some",
        ),
        (
            {"stage": "", "stderr": "ModuleNotFoundError: No module named 'smalti'"},
            CompileFailed,
            "the compiling process ended with status 1: ModuleNotFoundError: No module named "
            "'smalti'",
        ),
        (
            {"stage": "", "stderr": "OSError: [Errno 28] No space left on device: 'dumps'"},
            EstimateError,
            "the disk is full, so the compiler could not write its dumps; free some space, or "
            "point TMPDIR to a folder on another disk",
        ),
    ],
)
def test_other_failures(arguments, kind, line):
    error = explained(**arguments)
    assert type(error) is kind
    assert str(error) == line
    if isinstance(error, CompileFailed):
        assert arguments.get("stderr", "").strip() in error.compiler_message
