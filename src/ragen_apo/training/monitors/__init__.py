"""Monitors for collapse: thoughts that ignore the task, gradients without a signal, early stops.

All of them only look: weights, gradients and random draws afterwards are those of a run without.
"""
