"""What happened: results, figures, traces."""
