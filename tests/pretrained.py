"""The real pretrained model for tests, where it has been made."""

import os
from pathlib import Path

import pytest

SMOLLM2 = Path(
    os.environ.get("RAGEN_APO_SMOLLM2", Path(__file__).parents[1] / "models/smollm2-135m")
)
needs_smollm2 = pytest.mark.skipif(
    not SMOLLM2.exists(), reason=f"{SMOLLM2} is not there; `make models/smollm2-135m` makes it"
)
