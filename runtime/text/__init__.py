"""Words: tokens to text and back, and where a text stops."""
