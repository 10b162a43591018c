"""Evaluation: fixed tasks played once, success with its interval, failures by name."""
