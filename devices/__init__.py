"""Which processors and devices this machine has, and how an exported graph is made ready for one."""
