"""Graphs for ONNX Runtime: rewritten, opened on a provider, and the memory that they share."""
