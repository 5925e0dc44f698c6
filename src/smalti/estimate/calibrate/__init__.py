"""How far the stopwatch can be trusted: published times, predicted.

    result = calibrate()          # compiles and simulates every published row; minutes
    result.median_abs_error

`trust(chip)` is what every number that leaves the tool is labelled with; it reads what the last
`smalti estimate calibrate --write` found.
"""

from smalti.estimate.calibrate.report import Calibration, Predicted, calibrate
from smalti.estimate.calibrate.trust import Trust, trust

__all__ = ["Calibration", "Predicted", "Trust", "calibrate", "trust"]
