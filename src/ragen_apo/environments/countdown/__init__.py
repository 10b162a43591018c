"""Countdown: an expression of given numbers that reaches a target."""
