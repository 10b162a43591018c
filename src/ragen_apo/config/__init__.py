"""The configuration of a run: pydantic models, read from YAML, written back fully resolved.

    section.py               the base class of all sections, and the ranges of numbers
    machine, environment, agent, policy, rollouts, warm_start, tracking    a section each
    values.py                the sections of Stage 1: values and distillation
    training.py              the sections of Stage 2 and of evaluation; search.py is part of it
    algorithms.py            the algorithms by name, and what their sections share
    run.py                   RunConfig: all of them, and what must hold between them
    api_model.py             what an evaluation of a model behind an API depends on
    load.py                  from a file and overrides to a RunConfig, and back
    moved.py                 where the keys of version 0.1 are now
    shipped.py               the configurations that come with the package, by name
    references.py            environments that are named by the place of their code
    yaml_text, overrides, messages   YAML without duplicate keys, the command line, sentences

`load_config` takes a YAML file and command-line overrides and gives a `RunConfig`; `resolved_yaml`
is its inverse and is what a run directory keeps. Unknown keys, wrong types and values out of range
are refused together in one ConfigError. `python -m ragen_apo.config` prints docs/configuration.md.
"""

from ragen_apo.config.load import load_config, load_run_config, parse_config, resolved_yaml
from ragen_apo.config.run import RunConfig

__all__ = ["RunConfig", "load_config", "load_run_config", "parse_config", "resolved_yaml"]
