"""Graphs for OpenVINO: rewritten, compiled, and kept compiled."""
