"""How does an accepted request reach a worker? Flow control, driven on the event loop."""
