"""What the draft holds: its chain of fed tokens, branches, and the rounds that grow them."""
