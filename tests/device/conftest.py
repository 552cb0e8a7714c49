"""Stages that are the same are traced once."""

from traced_once import traced_anew, traced_once

__all__ = ["traced_anew", "traced_once"]
