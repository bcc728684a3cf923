"""Measures speed: own modes through the served pipeline, peers beside them, and the machine's own limits."""
