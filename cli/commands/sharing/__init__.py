"""Bundles on their way: packed for others, pushed to the hub."""
