"""Every test of the contract runs for every implementation."""

import pytest

from tests.support.calls import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request) -> str:
    return request.param
