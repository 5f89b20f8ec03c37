"""Where engine workers run and who keeps them running: one launcher for each kind of place."""
