"""Graphs for ONNX Runtime: rewritten before they are opened, and what each provider is told."""
