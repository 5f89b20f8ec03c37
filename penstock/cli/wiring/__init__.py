"""How does a configuration become running processes? The parts of a server that `penstock serve` builds,
starts and stops.
"""
