"""Conditions for the tests of the value store."""

import pytest

from ragen_apo.values.conditions import SamplingConditions
from tests import factories


@pytest.fixture
def conditions() -> SamplingConditions:
    return factories.conditions()
