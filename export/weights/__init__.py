"""Numbers: reading them from a checkpoint, converting, rounding to blocks, writing."""
