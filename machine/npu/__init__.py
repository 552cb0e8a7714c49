"""Compiling for NPUs that are not here: what they take, their compiler, its reports, the blobs that are kept."""
