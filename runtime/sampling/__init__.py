"""Which token is chosen: noise, filters, penalties, greedy and sampled choices."""
