"""Who computes: the protocols of target and draft, and the sessions behind them."""
