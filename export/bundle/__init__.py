"""Writing a bundle: stages on disk, a folder that appears whole, a journal to go on from."""
