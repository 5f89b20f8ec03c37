"""Which questions does a simulation answer? Setups with a criterion each."""
