"""What needs the peer that is a package of its own."""

import importlib.util

import pytest

NO_TOKAMAX = "needs pip install tokamax"
needs_tokamax = pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason=NO_TOKAMAX)
