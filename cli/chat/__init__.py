"""A conversation on the terminal: what `mirrorsd chat` consists of."""
