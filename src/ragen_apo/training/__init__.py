"""Training: warm start, Stage 1 and 2, checkpoints, and the run that strings them together."""
