"""What a machine wants of a bundle: what is fastest, whether it fits, graphs compiled for NPUs that are not here."""
