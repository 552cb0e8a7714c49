"""Draft, exits and target on OpenVINO."""
