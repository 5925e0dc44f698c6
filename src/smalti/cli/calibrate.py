"""`smalti estimate calibrate`: every published time that names a kernel, predicted."""

from smalti.cli.options import Json


def calibrate(json: Json = None) -> None:
    """Predict published kernel times, and show by how much the predictions are off."""
    from smalti.estimate.calibrate import calibrate as run

    run()
