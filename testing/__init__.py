"""Scripted models for tests of programs that embed mirrorsd."""
