"""The configuration of a run: pydantic models, read from YAML, written back fully resolved.

    section.py               the base class of all sections
    agent.py                 machine, environment, agent, model, warm start
    algorithms.py            A*-PO and its rivals
    training.py              steps, stop rules, monitors, evaluation
    tracking.py              experiment trackers
    run.py                   RunConfig: all of them, and what must hold between them
    load.py                  from a file and overrides to a RunConfig, and back
    yaml_text, overrides, messages   YAML without duplicate keys, the command line, sentences

`load_config` takes a YAML file and command-line overrides and gives a `RunConfig`; `resolved_yaml`
is its inverse and is what a run directory keeps. Unknown keys, wrong types and values out of range
are refused together in one ConfigError. `python -m ragen_apo.config` prints docs/configuration.md.
"""

from ragen_apo.config.load import load_config, load_run_config, parse_config, resolved_yaml
from ragen_apo.config.run import RunConfig

__all__ = ["RunConfig", "load_config", "load_run_config", "parse_config", "resolved_yaml"]
