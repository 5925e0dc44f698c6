"""What only the TPU compiler can answer."""

import importlib.util

import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed: pip install 'smalti[tpu]'",
)
