"""Every operation the simulator knows, in a hand-made bundle."""

import re

import pytest

from smalti.estimate.errors import SimulationFailed, UnknownOperation, Unstated
from smalti.estimate.simulate import operations
from smalti.estimate.simulate.operations import Unknown, UnknownBit

from .listings import HBM, VMEM, registers_after, run

WORD = 2**32


def word(value: int) -> int:
    return value % WORD


# Opcode, operands, result. Registers and numbers are words; negative ones two's complements.
BINARY = [
    ("sadd.s32", 3, 4, 7),
    ("sadd.s32", -1, 1, 0),
    ("sadd.s32", 2**31 - 1, 1, -(2**31)),
    ("ssub.s32", 3, 4, -1),
    ("ssub.s32", 0, -(2**31), -(2**31)),
    ("smul.u32", 7, 6, 42),
    ("smul.u32", -3, 5, -15),
    ("smul.u32", 2**16, 2**16, 0),
    ("smin.u32", 3, -1, 3),
    ("smin.u32", 5, 5, 5),
    ("smax.u32", 3, -1, -1),
    ("sand.u32", 0b1100, 0b1010, 0b1000),
    ("sor.u32", 0b1100, 0b1010, 0b1110),
    ("sxor.u32", -1, 0b1010, ~0b1010),
    ("sshll.u32", 3, 0, 3),
    ("sshll.u32", 3, 31, -(2**31)),
    ("sshll.u32", 3, 32, 0),
    ("sshll.u32", 3, 40, 0),
    ("sshrl.u32", -1, 0, -1),
    ("sshrl.u32", -1, 31, 1),
    ("sshrl.u32", -1, 32, 0),
    ("sshrl.u32", -1, 40, 0),
    ("sshra.s32", -8, 0, -8),
    ("sshra.s32", -8, 1, -4),
    ("sshra.s32", 8, 1, 4),
    ("sshra.s32", -8, 31, -1),
    ("sshra.s32", -8, 32, -1),
    ("sshra.s32", 8, 40, 0),
    ("scalar_lea.vmem", 5, 7, 12),
    ("scalar_lea.smem", 5, 7, 12),
    ("scalar_lea.hbm", 5, -1, 4),
    ("scalar_lea.cmem", 5, 7, 12),
    ("scalar_lea.sflag", 5, 7, 12),
]
COMPARISONS = [
    ("scmp.eq.s32.totalorder", {"==": True, "<": False, ">": False, "signed": False}),
    ("scmp.ne.s32.totalorder", {"==": False, "<": True, ">": True, "signed": True}),
    ("scmp.lt.s32.totalorder", {"==": False, "<": True, ">": False, "signed": True}),
    ("scmp.le.s32.totalorder", {"==": True, "<": True, ">": False, "signed": True}),
    ("scmp.gt.s32.totalorder", {"==": False, "<": False, ">": True, "signed": False}),
    ("scmp.ge.s32.totalorder", {"==": True, "<": False, ">": True, "signed": False}),
    ("scmp.lt.u32.totalorder", {"==": False, "<": True, ">": False, "signed": False}),
    ("scmp.le.u32.totalorder", {"==": True, "<": True, ">": False, "signed": False}),
    ("scmp.gt.u32.totalorder", {"==": False, "<": False, ">": True, "signed": True}),
    ("scmp.ge.u32.totalorder", {"==": True, "<": False, ">": True, "signed": True}),
]
PAIRS = {"==": (5, 5), "<": (4, 5), ">": (5, 4), "signed": (-1, 1)}
PREDICATES = [
    ("pnand", (0, 0), 1),
    ("pnand", (0, 1), 1),
    ("pnand", (1, 1), 0),
    ("por", (0, 0), 0),
    ("por", (0, 1), 1),
    ("por", (1, 1), 1),
    ("pneg", (0,), 1),
    ("pneg", (1,), 0),
    ("pmov", (0,), 0),
    ("pmov", (1,), 1),
]
UNARY = [("smov", -5, -5), ("sclz", 0, 32), ("sclz", 1, 31), ("sclz", -1, 0), ("sclz", 2**30, 1)]


def test_every_operation_has_a_listing_here():
    here = {case[0] for case in (*BINARY, *COMPARISONS, *PREDICATES, *UNARY)}
    assert here | {"scalar_select", "sc.u32"} == set(operations.EXPRESSIONS)


@pytest.mark.parametrize(("opcode", "a", "b", "result"), BINARY)
def test_words(opcode, a, b, result):
    in_registers = registers_after([f"%s9_s3 = {opcode} %s1_s1, %s2_s2"], s1=word(a), s2=word(b))
    assert in_registers["s3"] == word(result)
    # Numbers are written without a sign.
    assert registers_after([f"%s9_s3 = {opcode} {word(a)}, {word(b)}"])["s3"] == word(result)
    assert registers_after([f"%s9_s3 = {opcode} %s1_s1, {b}"], s1=word(a))["s3"] == word(result)


@pytest.mark.parametrize(("opcode", "a", "result"), UNARY)
def test_one_word(opcode, a, result):
    assert registers_after([f"%s9_s3 = {opcode} %s1_s1"], s1=word(a))["s3"] == word(result)


@pytest.mark.parametrize(("opcode", "results"), COMPARISONS)
def test_comparisons(opcode, results):
    for kind, (a, b) in PAIRS.items():
        found = registers_after([f"%p9_p3 = {opcode} %s1_s1, %s2_s2"], s1=word(a), s2=word(b))
        assert found["p3"] == results[kind], kind


@pytest.mark.parametrize(("opcode", "arguments", "result"), PREDICATES)
def test_predicates(opcode, arguments, result):
    names = ", ".join(f"%p{i}_p{i}" for i in range(len(arguments)))
    start = {f"p{i}": value for i, value in enumerate(arguments)}
    assert registers_after([f"%p9_p3 = {opcode} {names}"], **start)["p3"] == result
    negated = {name: 1 - value for name, value in start.items()}
    names = names.replace("%", "!%")
    assert registers_after([f"%p9_p3 = {opcode} {names}"], **negated)["p3"] == result


@pytest.mark.parametrize(("a", "b", "carry"), [(-1, 1, True), (-1, 0, False), (2**31, 2**31, True)])
def test_the_carry_of_an_addition(a, b, carry):
    found = registers_after(["%p9_p3 = sc.u32 %s1_s1, %s2_s2"], s1=word(a), s2=word(b))
    assert found["p3"] == carry


@pytest.mark.parametrize(("p", "positive", "negative"), [(1, 10, 20), (0, 20, 10)])
def test_choices_and_predicated_operations(p, positive, negative):
    for sign, result in (("", positive), ("!", negative)):
        chosen = f"%s9_s3 = scalar_select {sign}%p1_p1, 10, 20"
        assert registers_after([chosen], p1=p)["s3"] == result
        # smov (p, old), new: new where p holds.
        moved = f"%s9_s3 = smov ({sign}%p1_p1, %s8_s3), 10"
        assert registers_after([moved], p1=p, s3=20)["s3"] == result
        added = f"%s9_s3 = sadd.s32 ({sign}%p1_p1), 4, 6"
        assert registers_after([added], p1=p, s3=20)["s3"] == result
        loaded = f"%s9_s3 = sld [smem:[#allocation1]] ({sign}%p1_p1)"
        found = registers_after(["%1 = sst [smem:[#allocation1]] 10", loaded], p1=p, s3=20)
        assert found["s3"] == result
        stored = f"%2 = sst [smem:[#allocation1]] ({sign}%p1_p1), 10"
        bundles = [
            "%1 = sst [smem:[#allocation1]] 20",
            stored,
            "%s9_s3 = sld [smem:[#allocation1]]",
        ]
        assert registers_after(bundles, p1=p)["s3"] == result


@pytest.mark.parametrize("opcode", operations.RENAMES)
def test_a_renamed_register_keeps_its_value(opcode):
    register = "p5" if opcode == "pphi" else "s5"
    line = f"%x9_{register} = {opcode} [resolvable:$true] %x1_{register}"
    assert registers_after([line], **{register: 1})[register] == 1


@pytest.mark.parametrize(
    "line",
    [
        *(f"%1 = {opcode}" for opcode in operations.NOTHING),
        "%1 = vset.pattern.permute.xlu1 %v3_v4",
        "%1 = vpush %v3_v4",
        "%1 = vpush.ccrf %v3_v4",
        "%v9_v1 = vadd.f32 %v3_v4, %v5_v1",
    ],
)
def test_operations_without_an_effect_take_their_bundle(line):
    assert run([line, ""]).cycles == 2


def test_a_bundle_reads_what_was_there_before_it():
    swap = "%s9_s1 = smov %s2_s2  ;;  %s8_s2 = smov %s1_s1"
    found = registers_after([swap], s1=10, s2=20)
    assert (found["s1"], found["s2"]) == (20, 10)
    both = "%2 = sst [smem:[#allocation1]] 7  ;;  %s9_s3 = sld [smem:[#allocation1]]"
    found = registers_after(["%1 = sst [smem:[#allocation1]] 5", both, both.replace("s3", "s4")])
    assert (found["s3"], found["s4"]) == (5, 7)
    # An effect takes a register's value from before the bundle, too.
    stored = "%s9_s3 = sadd.s32 1, %s8_s3  ;;  %1 = sst [smem:[#allocation1]] %s8_s3"
    found = registers_after([stored, "%s9_s4 = sld [smem:[#allocation1]]"], s3=1)
    assert (found["s3"], found["s4"]) == (2, 1)


def test_smem_is_addressed_by_allocation_register_and_number():
    bundles = [
        "%s9_s1 = smov [#allocation1]",
        "%1 = sst [smem:[#allocation1 + $0x3]] 5  ;;  %2 = sst [smem:[#allocation2]] 9",
        "%3 = sst [smem:[#allocation3_spill]] 4  ;;  %s8_s2 = smov 2",
        "%s7_s3 = sld [smem:[%s9_s1 + $0x3]]  ;;  %s6_s4 = sld [smem:[%s9_s1 + %s8_s2]]",
        "%s5_s5 = sld [smem:[#allocation2]]  ;;  %s4_s6 = sld [smem:[#allocation3_spill]]",
        "%4 = sst [smem:[%s9_s1 + %s8_s2]] 8",
        "%s3_s7 = sld [smem:[#allocation1 + $0x2]]",
    ]
    found = registers_after(bundles)
    assert [found[f"s{i}"] for i in (3, 5, 6, 7)] == [5, 9, 4, 8]
    assert isinstance(found["s4"], Unknown)


@pytest.mark.parametrize(
    ("note", "results"),
    [("kDivAndRem", [6, 2]), ("kDiv", [6]), ("kRem", [2]), ('loc("a.py":1:2) :: kRem', [2])],
)
def test_divisions_leave_their_results_in_a_queue(note, results):
    bundles = [f"%7 = sdivrem.u32 %s1_s1, 3 /* {note} */"]
    bundles += [f"%s9_s{i + 2} = spop.drf %7" for i in range(len(results))]
    found = registers_after(bundles, s1=20)
    assert [found[f"s{i + 2}"] for i in range(len(results))] == results
    with pytest.raises(SimulationFailed, match=re.escape("a result of %7 is taken that is not")):
        registers_after([*bundles, "%s9_s5 = spop.drf %7"], s1=20)


def test_two_divisions_under_way_are_told_apart_and_one_by_zero_is_not_known():
    bundles = [
        "%7 = sdivrem.u32 20, 3 /* kDivAndRem */",
        "%8 = sdivrem.u32 4294967295, %s1_s1 /* kRem */",
        "%s9_s2 = spop.drf %8",
        "%s9_s3 = spop.drf %7",
        "%s9_s4 = spop.drf %7",
    ]
    found = registers_after(bundles, s1=2)
    assert [found[f"s{i}"] for i in (2, 3, 4)] == [1, 6, 2]
    found = registers_after(bundles, s1=0)
    assert found["s2"].why == "the result of a division by zero"


@pytest.mark.parametrize("opcode", operations.FLOATS)
def test_floating_point_is_not_known(opcode):
    operands = "%s1_s1" if opcode.startswith("scvt") else "0.5, %s1_s1"
    found = registers_after([f"%s9_s3 = {opcode} {operands}"], s1=7)
    assert found["s3"].why == "a number in floating point, from bundle 0x0"


@pytest.mark.parametrize("opcode", operations.FLOAT_COMPARISONS)
def test_comparisons_of_floating_point_are_not_known(opcode):
    found = registers_after([f"%p9_p3 = {opcode} %s1_s1, -1e-05"], s1=7)
    assert isinstance(found["p3"], UnknownBit)


def test_what_is_not_known_goes_through_arithmetic_and_is_lost_where_it_does_not_matter():
    bundles = [
        "%s9_s1 = spop %5  ;;  %p9_p3 = scmp.eq.s32.totalorder 0, 0",
        "%p9_p1 = scmp.lt.s32.totalorder %s9_s1, 3",
        "%s8_s2 = sand.u32 0, %s9_s1  ;;  %s7_s3 = sadd.s32 1, %s9_s1",
        "%p8_p2 = por %p9_p1, %p9_p3  ;;  %p7_p4 = pnand %p9_p1, !%p9_p3",
        "%s6_s4 = scalar_select %p9_p1, 1, 2  ;;  %s5_s5 = sadd.s32 (%p9_p1), 1, 2",
        "%s4_s6 = sshll.u32 1, %s9_s1  ;;  %s3_s7 = sshra.s32 %s9_s1, 2",
        "%s2_s8 = smin.u32 %s9_s1, 5  ;;  %s1_s9 = sclz %s9_s1  ;;  %p6_p5 = pneg %p9_p1",
        "%s9_s10 = scalar_select !%p9_p1, 1, 2  ;;  %s9_s11 = sshrl.u32 4, %s9_s1",
    ]
    found = registers_after(bundles, s5=4)
    assert (found["s2"], found["p2"], found["p4"]) == (0, 1, 1)
    why = "a value that came out of a vector register at bundle 0x0"
    names = ["s3", "s4", "s5", "s6", "s7", "s8", "s9", "s10", "s11", "p1", "p5"]
    assert {name: found[name].why for name in names} == dict.fromkeys(names, why)


BRANCH = [
    "%s9_s1 = spop %5",
    "%p9_p1 = scmp.lt.s32.totalorder %s9_s1, 3",
    "%6 = sbr.rel (%p9_p1) target = $region2",
    *[""] * 3,
    "// End region 1",
    "",
    "// Start region 2",
]


def test_a_branch_on_what_is_not_known_names_its_block_and_the_value():
    text = (
        "k.1, block at bundle 0x0: the control flow depends on a value that came out of a vector "
        "register at bundle 0x0"
    )
    with pytest.raises(Unstated, match=f"^{re.escape(text)}$"):
        run(BRANCH)
    assert run(BRANCH, branches={2: True}).bundles == 8
    assert run(BRANCH, branches={2: False}).bundles == 9
    assert run(BRANCH, branches={2: [False]}).bundles == 9


def test_stated_branches_that_run_out_or_are_none():
    with pytest.raises(
        SimulationFailed, match=r"branches\[0x2\] has 0 answers, and the branch is reached again"
    ):
        run(BRANCH, branches={2: []})
    text = "branches[0x1]: k.1 has no branch there; its branches are at 0x2"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        run(BRANCH, branches={1: True})


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("%1 = sst [smem:[%s1_s1]] 3", "a store to SMEM goes to an address that is register s1"),
        ("%1 = vsyncpa %s1_s1, 0", "a sync flag is chosen by register s1"),
        (
            "%1 = dma.hbm_to_vmem 5, %s1_s1, 6, [#allocation1]",
            "the size of a copy is register s1",
        ),
        (
            "%1 = dma.vmem_to_smem 5, 1, %s1_s1, [#allocation1]",
            "a copy into SMEM goes to an address that is register s1",
        ),
        ("%1 = dma.done.wait [#allocation1], %s1_s1", "the size of a wait is register s1"),
        (
            "%1 = dma.done.wait (%p1_p1), [#allocation1], 1",
            "the control flow depends on register p1",
        ),
    ],
)
def test_effects_on_what_is_not_known(line, text):
    with pytest.raises(Unstated, match=re.escape(text)):
        run([line])


@pytest.mark.parametrize(
    "line",
    [
        "%s9_s3 = sfrob.u32 %s1_s1, 2",
        "%s9_s3 = sfrob.u32 (%p1_p1), %s1_s1, 2",
        "%1 = sfrob.u32 %s1_s1",
        "%1 = sfrob.u32 (!%p1_p1), %s1_s1",
        "%1 = dma.hbm_to_moon %s1_s1, 1, 2, 3",
        "%1 = dma.cmem_to_vmem %s1_s1, 1, 2, 3",
        "%1 = dma.general %s1_s1, 1, %s2_s2, 3",
        "%1 = vwait.ne [#allocation1], 3",
        "%1 = vdelay 100",
        "%s9_s3 = vfrob %v1_v1",
        "%p9_p3 = vfrob %v1_v1",
        "%v9_v9, %s9_s3 = vfrob %v1_v1",
    ],
)
def test_an_operation_not_known_is_named(line):
    with pytest.raises(UnknownOperation, match=r"^k\.1: bundle 0x0 holds the operation '|register"):
        run([line])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("%s9_s3 = sadd.s32 %s1_s1", "sadd.s32 has 1 operands, not 2"),
        ("%s9_s3 = sadd.s32 %s1_s1, 2, 3", "sadd.s32 has 3 operands, not 2"),
        ("%s9_s3 = scalar_select %p1_p1, 2", "scalar_select has 2 operands, not 3"),
        ("%s9_s3 = sadd.s32 %s1_s64, 3", "'%s1_s64' is of a kind that is not known"),
        ("%s9_s3 = sadd.s32 %x, 3", "'%x' is of a kind that is not known"),
        ("%s9_x3 = smov 3", "what register is '%s9_x3'?"),
    ],
)
def test_operands_not_known_are_named(line, text):
    with pytest.raises(UnknownOperation, match=re.escape(text)):
        run([line])


@pytest.mark.parametrize("unit", ["", ".mxu0"])
def test_a_product_of_a_type_not_known_is_named(unit):
    with pytest.raises(UnknownOperation, match=r"holds the operation 'vmatmul\.s4\.gmra"):
        run([f"%1 = vmatmul.s4.gmra{unit} %v1_v1"])


def test_checks_of_the_compiler():
    assert run(["%1 = shalt.err (%p1_p1)"]).cycles == 1  # not known: taken to pass
    zero = "%p1_p1 = scmp.eq.s32.totalorder 0, 1"
    assert run([zero, "%1 = shalt.err (%p1_p1)"]).cycles == 2
    for line in ("%1 = shalt.err (!%p1_p1)", "%1 = shalt.err"):
        with pytest.raises(SimulationFailed, match="the kernel halts at bundle 0x1"):
            run([zero, line])


def test_the_first_of_the_cores_runs():
    found = registers_after(["%s9_s3 = sld [smem:[#allocation0]] /* core id */"])
    assert found["s3"] == 0


def test_operands_stand_apart():
    found = run([f"{HBM}  ;;  {VMEM}", "%p1_p1 = scmp.eq.s32.totalorder %s0_s0, %s3_s3", ""])
    assert found.cycles == 3
