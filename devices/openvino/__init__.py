"""Graphs for OpenVINO: rewritten, compiled, kept compiled, and run in parts."""
