"""A policy at work: a person watches it act, takes over, goes back and asks its reference.

policies.py   which policies a run has, and their models
writer.py     a response, token by token, by the engine of the rollouts
episode.py    an episode that policy and person play together, and going back in it
worker.py     the one thread in which models write, and who waits for it
values.py     V* of a state, from the run's value store
shown.py      from all that to what a page shows
routes.py     the addresses
"""
