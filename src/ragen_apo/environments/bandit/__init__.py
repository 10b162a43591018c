"""Bandits, one turn an episode: judged by names (`two_armed`) or by trying (`bernoulli`)."""
