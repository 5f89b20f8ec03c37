"""How does each engine's HTTP API differ? One dialect per API, and what they share."""
