"""Is every promise kept in every simulated world? Invariants, and random cases to break them."""
