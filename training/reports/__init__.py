"""What a draft or an exit is worth."""
