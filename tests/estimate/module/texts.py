"""Module texts for the tests: real ones from `fixtures`, and hand-written ones."""

import gzip
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"


def fixture(name: str) -> str:
    """The text of a real module, see fixtures/README.md."""
    packed = FIXTURES / f"{name}.txt.gz"
    if packed.exists():
        return gzip.decompress(packed.read_bytes()).decode()
    return (FIXTURES / f"{name}.txt").read_text()


def module(entry: str, others: str = "", parameters: str = "x: f32[8,128]") -> str:
    """A module whose entry holds these instructions, after these other computations."""
    head = "HloModule hand, is_scheduled=true, entry_computation_layout={()->()}\n\n"
    return f"{head}{others}\nENTRY %main ({parameters}) -> f32[] {{\n{entry.rstrip()}\n}}\n"


COUNTING = """
%body (s: (s32[], s32[])) -> (s32[], s32[]) {{
  %s.1 = (s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n.1 = s32[] get-tuple-element(%s.1), index=1
  %step.1 = s32[] constant({step})
  %next = s32[] add(%i.1, %step.1)
  ROOT %t.1 = (s32[], s32[]) tuple(%next, %n.1)
}}

%condition (s: (s32[], s32[])) -> pred[] {{
  %s.2 = (s32[], s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%s.2), index=0
  %n.2 = s32[] get-tuple-element(%s.2), index=1
  ROOT %test = pred[] compare({left}, {right}), direction={direction}
}}
"""


def counting_loop(
    start: object, limit: object, step: object, direction: str, swapped: bool = False
) -> str:
    """A loop over (i, n): i grows by `step` from `start` while `i <direction> n` holds."""
    sides = ("%n.2", "%i.2") if swapped else ("%i.2", "%n.2")
    others = COUNTING.format(step=step, left=sides[0], right=sides[1], direction=direction)
    entry = f"""\
  %x = f32[8,128] parameter(0)
  %start = s32[] constant({start})
  %limit = s32[] constant({limit})
  %state = (s32[], s32[]) tuple(%start, %limit)
  ROOT %while.1 = (s32[], s32[]) while(%state), condition=%condition, body=%body
"""
    return module(entry, others)
