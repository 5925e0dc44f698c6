from types import SimpleNamespace

import numpy as np
import pytest

from smalti.estimate.bundles.listing import Bundle, Operation
from smalti.estimate.bundles.utilization import UNITS
from smalti.estimate.report.lines import FOR_COPIES, FOR_MXU, NO_LINE, source_lines
from tests.estimate.report.programs import estimated


def simulation(*bundles, executions, spills=None, waiting=0.0, mxu=0.0):
    """Each bundle is the lines of its operations; None is an operation without one."""
    operations = [
        tuple(
            Operation("vadd", None, None, (), line and ("kernel.py", line), "", "vadd")
            for line in lines
        )
        for lines in bundles
    ]
    used = np.zeros((len(bundles), len(UNITS)), int)
    for address, (fills, stores) in (spills or {}).items():
        used[address, UNITS.index("VLOAD:FILL")] = fills
        used[address, UNITS.index("VSTORE:SPILL")] = stores
    return SimpleNamespace(
        listing=SimpleNamespace(
            bundles=tuple(Bundle(at, 0, ops) for at, ops in enumerate(operations))
        ),
        executions=np.array(executions),
        utilization=SimpleNamespace(used=used),
        cycles_waiting=waiting,
        cycles_mxu=mxu,
    )


def by_line(simulated):
    return {line.line or line.what: line for line in source_lines(simulated)}


def test_a_bundle_is_shared_among_the_operations_that_have_a_line():
    lines = by_line(simulation((1, 1, 2, None), executions=[6]))
    assert lines[1].cycles == pytest.approx(4)
    assert lines[2].cycles == pytest.approx(2)
    assert set(lines) == {1, 2}


def test_an_empty_bundle_belongs_to_what_comes_next():
    lines = by_line(simulation((1,), (), (), (2, 3), (), executions=[1, 4, 4, 1, 2]))
    assert lines[1].cycles == 1
    assert lines[2].cycles == lines[3].cycles == 0.5 + 4
    assert lines[2].empty_bundles == 4
    assert lines[1].empty_bundles == 0
    # Nothing comes after the last.
    assert lines[NO_LINE].cycles == lines[NO_LINE].empty_bundles == 2


def test_spills_go_to_the_lines_of_their_bundle():
    lines = by_line(simulation((1, 2), (None,), executions=[10, 1], spills={0: (3, 1), 1: (0, 2)}))
    assert lines[1].spills == lines[2].spills == 20
    assert lines[NO_LINE].spills == 2


def test_what_is_not_executed_owns_nothing():
    assert list(by_line(simulation((1,), (2,), executions=[0, 3]))) == [2]


def test_waits_stand_apart_and_the_most_expensive_comes_first():
    lines = source_lines(simulation((1,), executions=[5], waiting=7.0, mxu=1.5))
    assert [(line.what or line.line, line.cycles) for line in lines] == [
        (FOR_COPIES, 7.0),
        (1, 5.0),
        (FOR_MXU, 1.5),
    ]


@pytest.mark.parametrize("name", ["double", "jax_flash"])
def test_the_lines_of_a_real_kernel_add_up_to_its_cycles(name):
    (simulated,) = estimated(name).simulations.values()
    lines = source_lines(simulated)
    assert sum(line.cycles for line in lines) == pytest.approx(simulated.cycles)
    assert len([line for line in lines if line.line]) > 1
    empty = [not bundle.operations for bundle in simulated.listing.bundles]
    assert sum(line.empty_bundles for line in lines) == pytest.approx(
        simulated.executions[empty].sum()
    )
    spilled = simulated.slots_used["VLOAD:FILL"] + simulated.slots_used["VSTORE:SPILL"]
    assert sum(line.spills for line in lines) == pytest.approx(spilled)


def test_the_kernel_s_own_lines_are_found():
    (simulated,) = estimated("double").simulations.values()
    files = {line.file for line in source_lines(simulated) if line.file}
    assert files == {"programs.py"}
