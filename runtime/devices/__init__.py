"""Threads that own a device, and who shares its passes."""
