"""Whether this machine can print: WeasyPrint is installed, and finds Pango."""

import pytest

from ragen_apo.errors import ConfigError
from ragen_apo.report.pdf import require_pdf


def _missing() -> str:
    try:
        require_pdf()
    except ConfigError as error:
        return str(error)
    return ""


MISSING = _missing()
NEEDS_PDF = pytest.mark.skipif(bool(MISSING), reason=MISSING)
