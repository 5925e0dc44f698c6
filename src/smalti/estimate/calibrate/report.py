"""Every published row beside its prediction, with the constants in use and without the row."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from smalti.chips import TENSOR_CORES
from smalti.estimate.calibrate.fit import fit, leave_one_out, relative_error, wrong_orders
from smalti.estimate.calibrate.predict import Constants, Subject, subject
from smalti.estimate.calibrate.rows import Row, published
from smalti.estimate.errors import EstimateError

# A row of which dispatch is the larger part says nothing about its kernel.
CARRIED = 0.5


@dataclass(frozen=True)
class Predicted:
    """One row; seconds with dispatch where the published time has it, errors relative to it."""

    id: str
    file: str  # "published" or "tuned"
    chip: str
    kernel: str
    shape: str
    which: str  # the pass
    variant: str  # the program that stands for it
    published_s: float
    predicted_s: float
    predicted_device_s: float
    error: float  # with the constants in use
    left_out_error: float  # with constants fitted on all other rows
    carried_by_dispatch: bool


@dataclass(frozen=True)
class Calibration:
    rows: tuple[Predicted, ...]
    not_predicted: dict[str, str]  # row id: why
    constants: Constants  # in use: those of chips.py
    fitted: Constants  # what a fit on all rows gives now
    wrong_orders: tuple[tuple[str, str], ...]
    versions: dict[str, str]

    def of_file(self, file: str) -> list[Predicted]:
        """The rows that tell about the device."""
        return [r for r in self.rows if r.file == file and not r.carried_by_dispatch]

    @property
    def median_abs_error(self) -> float:
        """Over published.json's rows that name a kernel, but for those carried by dispatch."""
        return float(np.median([abs(row.error) for row in self.of_file("published")]))

    @property
    def worst_abs_error(self) -> float:
        return max(abs(row.error) for row in self.of_file("published"))

    @property
    def median_abs_left_out_error(self) -> float:
        return float(np.median([abs(row.left_out_error) for row in self.of_file("published")]))

    def to_json(self) -> dict:
        tuned = [abs(row.error) for row in self.of_file("tuned")]
        return {
            "label": "estimates",
            "rows": [asdict(row) for row in self.rows],
            "median_abs_error": self.median_abs_error,
            "worst_abs_error": self.worst_abs_error,
            "median_abs_left_out_error": self.median_abs_left_out_error,
            "tuned_median_abs_error": float(np.median(tuned)) if tuned else None,
            "tuned_worst_abs_error": max(tuned, default=None),
            "not_predicted": self.not_predicted,
            "constants": asdict(self.constants),
            "fitted_now": asdict(self.fitted),
            "wrong_orders": [list(pair) for pair in self.wrong_orders],
            "versions": self.versions,
        }


def constants_in_use() -> Constants:
    """Those of chips.py, which every estimate is made with."""
    cores = TENSOR_CORES.values()
    (latency,) = {core.dma_latency_s for core in cores}
    (share,) = {core.mxu_push_share for core in cores}
    return Constants(latency * 1e9, share, DISPATCH_S)


# Of a jitted call from a host beside a v5e, fitted; no estimate contains it but those of rows that
# were timed so.
DISPATCH_S = 110e-6


def calibrate(
    progress: Callable[[str], None] = lambda _: None,
    only: Callable[[Row], bool] = lambda _: True,
) -> Calibration:
    """Predicts every published row that names a kernel. Some minutes, less from the cache.

    Raises EstimateError where no row can be predicted, and CompilerMissing without libtpu.
    """
    from smalti.estimate.compile.api import _versions

    versions = _versions()
    subjects: list[Subject] = []
    missing: dict[str, str] = {}
    for row in published():
        if not row.names_a_kernel:
            missing[row.id] = "a training step whose batch is not published; see docs/estimate.md"
        elif only(row):
            try:
                subjects.append(subject(row))
            except EstimateError as error:
                missing[row.id] = str(error)
            progress(row.id)
    if not subjects:
        reasons = "; ".join(f"{row}: {why}" for row, why in missing.items())
        raise EstimateError(f"no published row can be predicted. {reasons}")
    return assess(subjects, missing, versions)


def assess(
    subjects: list[Subject], missing: dict[str, str], versions: dict[str, str]
) -> Calibration:
    constants = constants_in_use()
    rows = []
    for one, left_out in zip(subjects, leave_one_out(subjects), strict=True):
        seconds = one.seconds(constants)
        dispatch = seconds - one.device_seconds(constants)
        rows.append(
            Predicted(
                one.row.id,
                one.row.file,
                one.row.chip,
                one.row.kernel,
                one.row.shape,
                one.row.which,
                one.variant,
                one.row.seconds,
                seconds,
                one.device_seconds(constants),
                relative_error(one, constants),
                left_out,
                dispatch > CARRIED * seconds,
            )
        )
    return Calibration(
        tuple(rows),
        missing,
        constants,
        fit(subjects),
        tuple(wrong_orders(subjects, constants)),
        versions,
    )
