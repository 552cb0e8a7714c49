"""What a caller asks for, in settings and in words, and which tokens that is; what text tokens are."""
