"""The sub-commands of `mirrorsd train`."""
