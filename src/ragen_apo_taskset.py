"""The taskset id `ragen-apo-taskset` of verifiers, which looks for a package of that name."""

from ragen_apo.environments.verifiers import ChatHarness, TextEnv, TextTaskset

__all__ = ["ChatHarness", "TextEnv", "TextTaskset"]
