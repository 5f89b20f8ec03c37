"""One generator of exchanges per task. `registry.TASKS` lists them all."""
