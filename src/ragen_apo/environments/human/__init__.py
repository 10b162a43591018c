"""People as players: episodes in the terminal, and their recordings."""
