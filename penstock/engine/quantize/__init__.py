"""Rounds a checkpoint and writes it in a layout that others load too: `penstock quantize`."""
