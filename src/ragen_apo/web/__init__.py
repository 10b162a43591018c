"""Pages for people, on this machine: their server, their look, and the rooms that fill them."""
