"""How long will something take? Models that learn online from what was measured."""
