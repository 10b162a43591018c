"""Stage 2: the trainer, its algorithms and what they are made of."""
