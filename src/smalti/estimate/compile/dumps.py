"""Which of libtpu's dumps belongs to which Pallas kernel of the program."""

import re
from collections import defaultdict
from pathlib import Path

from smalti.estimate.errors import DumpUnreadable
from smalti.estimate.program import KernelDump

# libtpu's flags that write them. Other passes dump two to three times as much, of every fusion.
DUMP_FLAGS = (
    "--xla_jf_dump_to={folder}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=^final_",
    "--xla_mosaic_enable_llo_source_annotations=true",
)
_BUNDLES, _UTILIZATION = "final_bundles", "final_hlo-static-per-bundle-utilization"
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(\S+) = (.*)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) .*\{$")
_KERNEL = 'custom_call_target="tpu_custom_call"'


def find_kernels(signatures: str, folder: Path) -> dict[str, KernelDump]:
    """The dumps of every Pallas kernel, by the name of its op in the schedule.

    `signatures` is the module with the shapes of operands in place of their names. A kernel that
    takes part of its inputs' computation in (`allow_input_fusion`) is the fusion around it.
    Raises DumpUnreadable where a kernel's dump is missing or cannot be told from another's.
    """
    dumped = _Dumps(folder)
    found, missing = {}, {}
    for op, signature in _kernel_signatures(signatures).items():
        texts = dumped.of(op)
        if texts is None:
            missing[op] = signature
        else:
            found[op] = (signature, texts)
    # Kernels that are alike down to the memory their operands lie in are compiled once.
    by_signature = dict(found.values())
    for op, signature in missing.items():
        if signature not in by_signature:
            raise DumpUnreadable(
                f"the compiler dumped no schedule of {op}, nor of a kernel like it; this version "
                "of libtpu may write its dumps otherwise than the tested ones"
            )
        found[op] = (signature, by_signature[signature])
    return {op: KernelDump(op, *texts) for op, (_, texts) in found.items()}


def find_xla_ops(kernels: dict[str, KernelDump], folder: Path) -> dict[str, KernelDump]:
    """The dumps of XLA's own operations that were compiled to bundles, by op name."""
    dumped = _Dumps(folder)
    found = {}
    for op in dumped.ops():
        # The parts of the program around its operations have no name in the schedule.
        around = op in kernels or op.startswith("<") or op == "TLP"
        if not around and (texts := dumped.of(op)):
            found[op] = KernelDump(op, *texts)
    return found


def _kernel_signatures(module: str) -> dict[str, str]:
    """Of each kernel's op, all that decides how it is compiled, as text."""
    bodies: dict[str, list[str]] = defaultdict(list)
    ops: dict[str, tuple[str, str]] = {}  # name: (its computation, what it does)
    computation = ""
    for line in module.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        elif match := _INSTRUCTION.match(line):
            ops[match[1]] = computation, match[2]
            bodies[computation].append(match[2])
    inside = {}  # a fusion, by the computation that it fuses around a kernel
    for op, (_, does) in ops.items():
        called = re.search(r" fusion\(.*, calls=%([^\s,]+)", does)
        if called and any(_KERNEL in part for part in bodies[called[1]]):
            inside[called[1]] = op
    signatures = {}
    for op, (computation, does) in ops.items():
        if _KERNEL not in does:
            continue
        if computation in inside:
            op = inside[computation]
            call = ops[op][1].replace(f"%{computation}", "")
            signatures[op] = "\n".join([call, *bodies[computation]])
        else:
            signatures[op] = does
    return signatures


class _Dumps:
    """The dump files of a folder, by op."""

    def __init__(self, folder: Path):
        self._files: dict[tuple[str, str], list[Path]] = defaultdict(list)
        for path in sorted(folder.glob("*.txt")):
            # <time>-<op>-<number of the dump>-<kind>.txt
            if match := re.fullmatch(rf"\d+-(.+)-\d+-({_BUNDLES}|{_UTILIZATION})\.txt", path.name):
                self._files[match[2], match[1]].append(path)

    def ops(self) -> list[str]:
        return sorted({op for kind, op in self._files if kind == _BUNDLES})

    def of(self, op: str) -> tuple[str, str] | None:
        """Bundles and utilization; None where the op has no dump."""
        bundles, utilization = self._text(_BUNDLES, op), self._text(_UTILIZATION, op)
        if bundles is None and utilization is None:
            return None
        if not bundles or not utilization:
            raise DumpUnreadable(
                f"the compiler's dump of {op} is incomplete: its "
                f"{'utilization' if bundles else 'bundles'} are missing; is the disk full?"
            )
        return bundles, utilization

    def _text(self, kind: str, op: str) -> str | None:
        files = self._files.get((kind, op)) or self._shortened(kind, op)
        texts = {path.read_text() for path in files}
        if len(texts) > 1:
            raise DumpUnreadable(
                f"the compiler dumped {op} {len(files)} times with different {kind}, and which of "
                "them it uses is not known; if its name is long, a shorter one may help"
            )
        return texts.pop() if texts else None

    def _shortened(self, kind: str, op: str) -> list[Path]:
        """A long name is cut, and a hash takes the place of the rest."""
        return [
            path
            for (of_kind, name), paths in self._files.items()
            if of_kind == kind
            and (match := re.fullmatch(r"(.{100,})-\d+", name))
            and op.startswith(match[1])
            for path in paths
        ]
