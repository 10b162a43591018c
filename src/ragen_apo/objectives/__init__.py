"""Training objectives as pure functions on tensors; no environment, policy or agent in sight."""
