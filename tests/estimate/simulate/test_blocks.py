"""Branches and their delay slots."""

import re

import pytest

from smalti.chips import TENSOR_CORES
from smalti.estimate.bundles.listing import parse_listing
from smalti.estimate.errors import DumpUnreadable, UnknownOperation
from smalti.estimate.simulate.blocks import delay_slots, mxu_cycles

from .listings import registers_after, run, text

SLOTS = {"v4": 1, "v5e": 4, "v5p": 4, "v6e": 4}
NEVER = "%p1_p1 = scmp.eq.s32.totalorder 0, 1"
ALWAYS = "%p1_p1 = scmp.eq.s32.totalorder 0, 0"
COUNT = "%s9_s3 = sadd.s32 1, %s8_s3"
BODY = "%s9_s4 = sadd.s32 1, %s8_s4"
BRANCH = "%1 = sbr.rel (%p1_p1) target = $region2"


def forward(condition: str, slots: str, body: int = 9) -> list[str]:
    """A branch at 0x1 over `body` bundles. In `slots`, x is an operation and . none; | ends the
    region around the branch, and < starts the next."""
    bundles = [f"{condition} // Start region 1", BRANCH]
    starting = ""
    for character in slots:
        if character == "|":
            bundles[-1] += " // End region 1"
        elif character == "<":
            starting = " // Start region 3"
        else:
            bundles.append({"x": COUNT, ".": ""}[character] + starting)
            starting = ""
    bundles += [BODY + starting, *[BODY] * (body - 1)]
    bundles[-1] += " // End region 3"
    return [*bundles, " // Start region 2", ""]


@pytest.mark.parametrize("chip", SLOTS)
@pytest.mark.parametrize(("condition", "body"), [(NEVER, 9), (ALWAYS, 0)])
def test_slots_run_whether_the_branch_is_taken_or_not(chip, condition, body):
    slots = SLOTS[chip]
    bundles = forward(condition, "x" * slots + "|")
    found = registers_after(bundles, chip, s3=0, s4=0)
    assert (found["s3"], found["s4"]) == (slots, body)
    # The condition counts as it is where the branch stands, not after its slots.
    bundles[2] = f"{NEVER.replace('eq', 'ne')}  ;;  {bundles[2]}"
    found = registers_after(bundles, chip, s3=0, s4=0)
    assert (found["s3"], found["s4"]) == (slots, body)
    assert run(bundles, chip=chip).bundles == 2 + slots + body + 2


@pytest.mark.parametrize("chip", SLOTS)
def test_a_region_that_ends_elsewhere_is_another_format(chip):
    bundles = forward(ALWAYS, "x" * (SLOTS[chip] + 1) + "|")
    expected = (
        f"k.1: no region ends {SLOTS[chip]} bundles after the branch at 0x1, as it does on {chip}; "
        "the format of this libtpu is not known"
    )
    with pytest.raises(DumpUnreadable, match=f"^{re.escape(expected)}$"):
        run(bundles, chip=chip)


# Shapes seen in dumps of v7x: six slots, of which the empty ones at the end may be one bundle.
@pytest.mark.parametrize(
    ("slots", "count"),
    [
        ("xxxxxx|", 6),
        ("......|", 6),
        ("x...xx|", 6),
        ("....xx|", 6),
        ("x.x.x.|", 6),
        ("xxxxx.|", 6),
        ("xxx|xxx|", 6),
        ("xxxxxx", 6),
        (".<", 1),
        ("x.<", 2),
        ("xxxx.<", 5),
        ("x|.<", 2),
        ("xx.x|.<", 5),
        (".", 1),
        ("xx.", 3),
        ("xxxx.", 5),
    ],
)
@pytest.mark.parametrize(("condition", "body"), [(NEVER, 9), (ALWAYS, 0)])
def test_slots_of_v7x(slots, count, condition, body):
    bundles = forward(condition, slots)
    found = registers_after(bundles, "v7x", s3=0, s4=0)
    assert (found["s3"], found["s4"]) == (slots.count("x"), body)
    # Empty slots that the listing leaves out take their time.
    simulation = run(bundles, chip="v7x")
    assert simulation.bundles == simulation.cycles == 2 + 6 + body + 2
    assert simulation.executions[1 : 3 + count].tolist() == [1] * (1 + count) + [body // 9]


@pytest.mark.parametrize(("condition", "body"), [(NEVER, 1), (ALWAYS, 0)])
def test_on_v7x_what_was_moved_into_the_slots_bears_the_condition(condition, body):
    moved = "%s9_s4 = sadd.s32 (!%p1_p1), 1, %s8_s4"
    stored = "%2 = vst [vmem:[#allocation4] sm:$0xff] (!%p1_p1), %v1_v1"
    for operation in (moved, f"{moved}  ;;  {stored}"):
        bundles = [condition, BRANCH, "", operation, "", " // Start region 2", ""]
        assert registers_after(bundles, "v7x", s4=0)["s4"] == body
        assert run(bundles, chip="v7x").bundles == 2 + 6 + 2


def test_on_v7x_a_short_body_that_ends_where_slots_could_is_no_slot():
    bundles = forward(ALWAYS, ".", body=5)
    # The body's operations were moved up, so that its region starts ahead of the branch.
    bundles[1] = bundles[1] + " // Start region 3"
    found = registers_after(bundles, "v7x", s3=0, s4=0)
    assert found["s4"] == 0


def loop(slots: str, after: str) -> list[str]:
    """Three rounds; `after` are the bundles behind, of which | ends a region around the loop."""
    bundles = [
        "%s1_s1 = smov 0 // Start region 1",
        "%s2_s1 = sadd.s32 1, %s1_s1 // Start region 2",
        "%p1_p1 = scmp.lt.s32.totalorder %s2_s1, 3 // Start region 3",
        "%1 = sbr.rel (%p1_p1) target = $region2",
    ]
    for part, line in ((slots, COUNT), (after, BODY)):
        for character in part:
            if character == "|":
                bundles[-1] += " // End region 3 :: End region 2" if part is slots else ""
                bundles[-1] += " // End region 1" if part is after else ""
            else:
                bundles.append(line if character == "x" else "")
    return bundles


@pytest.mark.parametrize(
    ("slots", "after"),
    [
        ("......|", "xx|x"),
        ("x.....|", "xx|x"),
        ("...x|..|", "x"),
        # The region around the loop ends within six bundles of the branch.
        (".", "xx|xxxx"),
        (".", "x|xxxxx"),
        ("x.", "xxx|xxx"),
        ("...x|.", "x|xxxxx"),
        (".x|.", "xxxx"),
        ("xxx|.", "xxxxxxx"),
    ],
)
def test_the_loop_of_v7x_ends_with_its_own_slots(slots, after):
    found = registers_after(loop(slots, after), "v7x", s3=0, s4=0)
    assert (found["s1"], found["s3"]) == (3, 3 * slots.count("x"))
    assert found["s4"] == after.count("x")
    assert run(loop(slots, after), chip="v7x").bundles == 1 + 3 * (3 + 6) + len(
        after.replace("|", "")
    )


@pytest.mark.parametrize("slots", ["..", ".x.", "x..x", "xx<xxxx"])
def test_slots_of_v7x_that_cannot_be_told_are_an_error(slots):
    expected = "k.1: it cannot be told where the delay slots of the branch at 0x1 end; "
    with pytest.raises(DumpUnreadable, match=f"^{re.escape(expected)}"):
        run(forward(ALWAYS, slots), chip="v7x")


def test_branches_into_delay_slots_and_in_them():
    into = forward(ALWAYS, "xxxx|")
    into[4] += " // Start region 7"
    into[-1] = "%2 = sbr.rel (%p1_p1) target = $region7"
    into += ["", "", "", " // End region 9", ""]
    within = forward(ALWAYS, "xxxx|")
    within[3] = "%2 = sbr.rel (%p1_p1) target = $region2"
    within[7] += " // End region 8"
    expected = "k.1: a branch goes into, or stands in, the delay slots of the branch at 0x1"
    for bundles in (into, within):
        with pytest.raises(UnknownOperation, match=f"^{re.escape(expected)}$"):
            run(bundles)
    twice = forward(ALWAYS, "xxxx|")
    twice[1] += f"  ;;  {BRANCH}"
    with pytest.raises(DumpUnreadable, match=r"^k.1: bundle 0x1 branches twice$"):
        run([twice[0], f"{BRANCH}  ;;  {BRANCH}", *twice[2:]])


def test_a_branch_without_a_condition_is_taken():
    bundles = forward(ALWAYS, "xxxx|")
    bundles[1] = "%1 = sbr.rel target = $region2"
    assert registers_after(bundles, s3=0, s4=0)["s4"] == 0


def test_a_branch_over_all_that_is_left_goes_to_the_end():
    """As v5p's kernels have it: the second core skips the whole kernel."""
    bundles = [line.replace("region 1", "region 8") for line in forward(ALWAYS, "xxxx|")[:-2]]
    bundles[6] += " // Start region 1"
    assert "region 2" not in text(bundles)
    bundles[-1] = bundles[-1].replace("End region 3", "End region 1")
    for exit_bundle in ([], [""]):
        found = registers_after([*bundles, *exit_bundle], s3=0, s4=0)
        assert found["s4"] == 0
    with pytest.raises(DumpUnreadable, match=r"^k.1: a branch goes to '\$region2', which the dump"):
        run([*bundles, "", ""])


def test_one_register_written_twice():
    with pytest.raises(DumpUnreadable, match=r"^k.1: bundle 0x0 writes one register twice$"):
        run(["%s1_s1 = smov 1  ;;  %s2_s1 = smov 2"])


def products(*opcodes: str):
    return parse_listing(text([f"%1 = {opcode} %v1_v1" for opcode in opcodes]), "k.1").bundles


@pytest.mark.parametrize(
    ("opcode", "rows"),
    [
        ("vmatmul.bf16.gmra.mxu0", 16),
        ("vmatmul.mubr.bf16.vlgmr.msra.gmra.mxu0", 16),
        ("vmatmul.mubr.f32.gmra.mxu0", 8),
        ("vmatmul.msk.gmra.mxu0", 8),
        ("vmatmul.s8.gmra.mxu0", 16),
        ("vmatmul.f8e4m3fn.gmra.mxu0", 32),
        ("vmatmul.bf8.bf16.gmra.mxu0", 32),
        ("vmatmul.lmr.bf16.vlgmr.msra.gmra.16.mxu0", 16),
    ],
)
def test_a_product_keeps_an_mxu_for_its_rows(opcode, rows):
    for chip, per_cycle in (("v5e", 1), ("v6e", 2)):
        core = TENSOR_CORES[chip]
        assert mxu_cycles(products(opcode), core) == {0: rows / per_cycle}
        push = opcode.replace("vmatmul", "vmatpush1")
        assert mxu_cycles(products(push), core) == {0: rows / per_cycle * core.mxu_push_share}


def test_a_schedule_that_asks_an_mxu_for_too_much_waits_for_it():
    two = "  ;;  ".join(f"%{i} = vmatmul.bf16.gmra.mxu{i} %v1_v1" for i in (0, 1))
    simulation = run([two, two, ""], chip="v5e")
    assert simulation.cycles == 32  # two products of 16 rows each, on both
    assert (simulation.bundles, simulation.cycles_mxu, simulation.mxu_busy) == (3, 29, 64)
    assert run([two, *[""] * 40], chip="v5e").cycles_mxu == 0


def test_delay_slots_of_every_chip_are_read_off_its_listing():
    for chip, slots in SLOTS.items():
        listing = parse_listing(text(forward(ALWAYS, "x" * slots + "|")), "k.1")
        assert delay_slots(listing, 1, slots + 11, TENSOR_CORES[chip]) == slots
