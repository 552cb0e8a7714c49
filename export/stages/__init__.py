"""The PyTorch modules that become stages: prefix, exits, suffix, draft."""
