"""The algorithms, one file each: formula, source, assumption, settings, traits and code.

`config.algorithms.ALGORITHMS` has a row for each. No module here imports torch before it computes.
"""
