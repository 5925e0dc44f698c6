"""``python -m smalti.lab.bench``: time attention on this CPU beside its peers."""

import argparse
import fnmatch
import sys
import time
from pathlib import Path

try:
    from rich.console import Console
except ImportError:
    sys.exit("smalti.lab.bench needs rich, which is not installed: pip install 'smalti[bench]'")

from smalti.lab.bench.cases import MEMORY_CASE, OURS, Case, all_cases, quick
from smalti.lab.bench.cpu import use_cpu
from smalti.lab.bench.decode import DecodeCase, decode_record, measure_decode, print_decode
from smalti.lab.bench.decode import quick as quick_decode
from smalti.lab.bench.memory import growth_in_fresh_process
from smalti.lab.bench.report import Memory, print_memory, print_result, record, write_json
from smalti.lab.bench.run import measure
from smalti.lab.bench.torch_peers import Unavailable

MEMORY = "memory"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m smalti.lab.bench", allow_abbrev=False, description=__doc__
    )
    parser.add_argument(
        "--only", metavar="PATTERN", help="cases whose name holds PATTERN, or matches it (*, ?)"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record goes")
    parser.add_argument(
        "--quick", action="store_true", help="an eighth of the length, 2 rounds: a look, no result"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = 2 if options.quick else 5
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; give 1 or more")
    return options


def is_chosen(name: str, pattern: str | None) -> bool:
    return pattern is None or pattern in name or fnmatch.fnmatchcase(name, pattern)


def measure_memory(case: Case) -> Memory:
    memory = Memory(case.name)
    for name in (OURS, *case.peers):
        try:
            memory.growth_mib[name] = growth_in_fresh_process(name, case)
        except Unavailable as reason:
            memory.left_out[name] = str(reason)
    return memory


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    resize = quick if options.quick else (lambda case: case)
    cases = [case for case in map(resize, all_cases()) if is_chosen(case.name, options.only)]
    memory_case = resize(MEMORY_CASE)
    with_memory = is_chosen(f"{MEMORY}/{memory_case.name}", options.only)
    decode_case = quick_decode(DecodeCase()) if options.quick else DecodeCase()
    with_decode = is_chosen(decode_case.name, options.only)
    names = [case.name for case in cases] + [decode_case.name] * with_decode
    names += [f"{MEMORY}/{memory_case.name}"] * with_memory
    if options.list:
        print("\n".join(names))
        return 0
    if not names:
        print(f"--only {options.only!r} matches no case; --list prints them", file=sys.stderr)
        return 2

    use_cpu()
    console, results, memory, decoded, stopped = Console(), [], None, None, False
    try:
        with console.status("starting") as status:
            for case in cases:
                results.append(measure(case, options.rounds, status.update))
                print_result(console, results[-1])
            if with_decode:
                decoded = measure_decode(decode_case, options.rounds, status.update)
                print_decode(console, decoded)
            if with_memory:
                status.update("memory: fresh processes")
                memory = measure_memory(memory_case)
                if options.quick:
                    memory.bar_mib = None
                print_memory(console, memory)
    except KeyboardInterrupt:
        stopped = True
        print("stopped: what was measured to its end is kept", file=sys.stderr)
        if not results and decoded is None:
            return 130
    path = options.json or Path("bench-results") / time.strftime("bench-%Y%m%d-%H%M%S.json")
    content = record(results, memory, options.rounds)
    content["decode"] = None if decoded is None else decode_record(decoded)
    write_json(path, content)
    console.print(f"Every sample is in {path}", highlight=False, soft_wrap=True)
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
