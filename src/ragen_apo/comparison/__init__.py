"""Several algorithms on the same tasks, reference, seeds and budget."""
