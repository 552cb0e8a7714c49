"""Training heads that read the target's hidden states: their shapes, loss, loop, files and report."""
