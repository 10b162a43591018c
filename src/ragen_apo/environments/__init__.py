"""Text worlds: find them by name with `ragen_apo.environments.base.make_environment`."""
