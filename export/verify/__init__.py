"""Whether what was written computes what the checkpoint does, and what precision costs."""
