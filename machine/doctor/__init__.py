"""Whether this machine fits: hardware, versions, memory, checks."""
