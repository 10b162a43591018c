"""`python -m ragen_apo.config` prints docs/configuration.md."""

import sys

from ragen_apo.config.messages import keys_of, reference_page
from ragen_apo.config.run import RunConfig

sys.stdout.write(reference_page({key.path: key for key in keys_of(RunConfig)}))
