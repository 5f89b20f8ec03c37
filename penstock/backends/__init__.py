"""Workers of any kind behind one contract. An adapter translates; it decides nothing."""
