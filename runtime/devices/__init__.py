"""On what: worker threads, cores, layouts, and what this machine has."""
