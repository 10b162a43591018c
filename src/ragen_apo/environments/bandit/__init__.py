"""Bandits: arms judged by their names (`two_armed`) or by their results (`bernoulli`)."""
