"""How far the stopwatch can be trusted: published times, predicted.

    result = calibrate()          # compiles and simulates every published row; minutes
    result.median_abs_error

`smalti.estimate.trust` reads what the last `smalti estimate calibrate --write` found.
"""

from smalti.estimate.calibrate.report import Calibration, Predicted, calibrate

__all__ = ["Calibration", "Predicted", "calibrate"]
