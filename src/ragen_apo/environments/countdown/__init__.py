"""Countdown: the environment, and the arithmetic that reads and searches expressions."""
