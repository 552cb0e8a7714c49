"""What a checkpoint is, whether it fits, and loading it with or without its weights."""
