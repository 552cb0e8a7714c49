"""Threads that own a device, who shares its passes, and what this machine has."""
