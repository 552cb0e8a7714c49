"""How a step goes: verify a window, commit what the target says, find the next window."""
