"""A training run: its time, checkpoints, rates, locks and curves."""
