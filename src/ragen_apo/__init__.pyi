# What `__init__.py` imports on demand. Static tools read it here, so that no module of the package
# seems to import all of it.
from ragen_apo.api import Run as Run
from ragen_apo.api import compare as compare
from ragen_apo.api import episodes as episodes
from ragen_apo.api import estimate_values as estimate_values
from ragen_apo.api import evaluate as evaluate
from ragen_apo.api import evaluate_api as evaluate_api
from ragen_apo.api import open_run as open_run
from ragen_apo.api import push_to_hub as push_to_hub
from ragen_apo.api import train as train
from ragen_apo.api import write_report as write_report
from ragen_apo.errors import RagenApoError as RagenApoError

__version__: str
