"""The scenarios by name: every failure row and follow-up question of the requirement, and the everyday ones.

All are small (a few thousand steps), so that each takes seconds; `--set workers=... --set load=...` makes
them larger. Importing this module registers them all.
"""

from penstock.sim.scenarios import capacity, cells, everyday, faults, overload, versions
from penstock.sim.scenarios.scenario import SCENARIOS

__all__ = ["SCENARIOS", "capacity", "cells", "everyday", "faults", "overload", "versions"]
