"""Sokoban: boxes onto targets, on levels that are generated and solved."""
