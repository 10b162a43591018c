"""Rollouts by inference servers: requests, weights, checks, and the engine that joins them."""
