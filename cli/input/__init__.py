"""What a user gives: options, prompts, requests."""
