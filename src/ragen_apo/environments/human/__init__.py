"""People as players: episodes in the terminal, and what they record."""
