"""What is worth doing: windows, roots, rounds, repeats, methods, and the times that decide."""
