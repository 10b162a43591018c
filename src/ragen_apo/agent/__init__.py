"""RAGEN's three roles: environment manager, context manager, agent proxy."""
