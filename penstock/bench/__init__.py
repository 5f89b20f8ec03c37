"""Load generation and comparisons, from outside, over HTTP."""
