"""Is a new version as good as the old one? Who gets it meanwhile, and when that is decided."""
