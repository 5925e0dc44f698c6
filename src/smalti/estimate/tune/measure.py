"""One candidate, compiled and estimated."""

from smalti.estimate.compile import compile_for
from smalti.estimate.errors import CompilerMissing, EstimateError
from smalti.estimate.module.hlo import read_module, scoped_vmem_bytes
from smalti.estimate.peers import Variant
from smalti.estimate.result import Estimate, estimate
from smalti.estimate.tune.trial import Trial

# What `compile_for` says where the machine, not the candidate, was the reason.
_MACHINE = ("died of SIGKILL", "took longer than")


def measure(variant: Variant, chip: str) -> Trial:
    """A candidate that cannot be built, compiled or simulated is a trial with the reason.

    Raises CompilerMissing, and a plain EstimateError (a peer that is not installed, a full disk):
    those would be the same for every candidate.
    """
    if variant.refused is not None:
        return Trial(reason=variant.refused)
    try:
        program = compile_for(variant.fn, *variant.args, chip=chip, flags=variant.flags)
    except CompilerMissing:
        raise
    except Exception as error:  # what a library raises for blocks it dislikes is of any kind
        if type(error) is EstimateError:
            raise
        return _missed(error)
    try:
        result = estimate(program)
    except EstimateError as error:
        return _missed(error)
    if unpriced := result.summary.unpriced:
        names = ", ".join(op.name for op in unpriced[:3])
        return Trial(
            reason="its cycles are a lower bound, which cannot be compared: "
            f"{len(unpriced)} operations have no price ({names})"
        )
    return Trial(
        cycles=float(result.cycles),
        time_ns=float(result.time_ns),
        bytes_hbm=int(result.bytes_hbm),
        bound=result.bound,
        kernels_time_ns=float(result.kernel_cycles / result.core.clock_hz * 1e9),
        occupancy={unit: float(share) for unit, share in result.occupancy.items()},
        vmem_bytes=_most_vmem(result),
    )


def _most_vmem(result: Estimate) -> int | None:
    used = scoped_vmem_bytes(read_module(result.program.hlo))
    return max((used[op.name] for op in result.schedule.kernels if op.name in used), default=None)


def _missed(error: Exception) -> Trial:
    text = " ".join(str(error).split()) or "it says nothing"
    if not isinstance(error, (EstimateError, NotImplementedError)):
        text = f"{type(error).__name__}: {text}"
    return Trial(reason=text, lasting=not any(words in text for words in _MACHINE))
