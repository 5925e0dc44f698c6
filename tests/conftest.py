"""What every test runs under."""

import os

# Before jax is imported: a GPU or TPU of the machine would change rounding and times.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _bounded_compilation_caches():
    """Drop compiled programs after each module: over a whole run they would fill the memory."""
    yield
    jax.clear_caches()
