"""The shops as pages: a person shops for the goals of an environment, as the agent does.

display.py   what a page shows, and the action in text behind each of its buttons
fronts.py    from the state of an environment to such a page: catalogue_front.py, webshop_front.py
episode.py   one person's episode, and what is kept of it
visits.py    who is in the shop: a session each, with an end
goals.py     which goals there are, and what the agent did on them
routes.py    the addresses
"""
