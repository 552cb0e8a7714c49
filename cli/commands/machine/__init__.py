"""Commands about this machine: what it has, whether it is fit, what is kept on it."""
