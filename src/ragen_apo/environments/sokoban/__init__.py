"""Sokoban: the environment, and levels without text (rules, solver, generator)."""
