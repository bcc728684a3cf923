"""The forward pass in C: compiled once on the machine that runs it, called without a copy."""
