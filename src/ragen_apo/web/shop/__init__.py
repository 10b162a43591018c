"""The shops as pages: a person shops for the goals of an environment, as the agent does.

display.py   what a page shows, and the action in text behind each of its buttons
*_front.py   from the state of an environment, never its text, to such a page, and from the words
             of a search to an action
episode.py   one person's episode, and what is kept of it
visits.py    who is in the shop: a session each, with an end
goals.py     which goals there are, and what the agent did on them
routes.py    the addresses
"""
