"""Train what a pair needs: the streaming draft, the exit adapters, and the text to train them on."""
