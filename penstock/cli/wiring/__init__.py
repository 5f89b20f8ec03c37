"""How does a configuration become running processes? What `penstock serve` builds, starts and stops."""
