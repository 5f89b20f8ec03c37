"""Models from elsewhere, kept on this machine's disk: bounded, checked, and fetched once."""
