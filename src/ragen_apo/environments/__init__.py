"""Text environments; `ragen_apo.environments.base.make_environment` makes one by name."""
