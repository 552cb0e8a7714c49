"""Bundles that are served: which are loaded, whose turn it is on their seats, and what identifies what they answer."""
