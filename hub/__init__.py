"""The Hugging Face hub and other places where models lie: checkpoints for an export, ready bundles for everybody."""

from mirrorsd.hub.bundles import bundle_folder

__all__ = ["bundle_folder"]
