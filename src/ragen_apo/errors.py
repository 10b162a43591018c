"""The errors that a user can meet. Each message says what, got, expected and what to do.

`RagenApoError` is the root, so a caller can catch everything this package raises on purpose.
Assertions are kept for our own invariants and are never part of the interface.
"""


class RagenApoError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigError(RagenApoError):
    """A configuration is missing, malformed, has an unknown key or a value out of range."""


class EnvironmentDataError(RagenApoError):
    """An environment's data (a catalogue, a goal file) is missing or inconsistent."""


class EnvironmentFaultError(RagenApoError):
    """The code of an environment does what no environment may; its author has to repair it."""


class EnvironmentRaisedError(EnvironmentFaultError):
    """An environment raised something, which it may not do another time."""


class ModelError(RagenApoError):
    """A model folder cannot be used: no tokenizer, no chat template, unreadable weights."""


class ContextError(RagenApoError):
    """A conversation cannot be rendered into tokens for this model."""


class ApiError(RagenApoError):
    """A server with a model cannot be reached, refuses, or answers what is no answer."""


class ServerError(RagenApoError):
    """An inference server does not answer, or does not answer what it was asked."""


class ValueStoreError(RagenApoError):
    """The value store is unreadable or belongs to other conditions than those asked for."""


class MissingValueError(ValueStoreError):
    """Stage 2 asked for the V* of a task that Stage 1 has not sampled."""


class CheckpointError(RagenApoError):
    """A checkpoint cannot be written or read."""


class RanksError(RagenApoError):
    """Another process of the run has ended, hangs, or does something else than this one."""


class TrainingError(RagenApoError):
    """An update cannot be made: the gradient is not finite."""


class HubError(RagenApoError):
    """The Hugging Face hub cannot be reached, or refuses what it was sent."""


class RunDirectoryError(RagenApoError):
    """A run directory exists already, is not a run, or does not hold what was asked for."""
