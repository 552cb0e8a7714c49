"""What a user sees: the console, failures, reports."""
