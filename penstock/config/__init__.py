"""The configuration: one frozen typed tree, read at the edge; every part receives its own branch."""
