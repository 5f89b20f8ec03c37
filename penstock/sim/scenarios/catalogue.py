"""The scenarios by name: every failure row and follow-up question of the requirement, and the everyday ones.

All are small (a few thousand steps), so that each takes seconds; `--set workers=... --set load=...` makes them larger. Importing
this module registers them all.
"""

from penstock.sim.scenarios import everyday as scenarios_everyday
from penstock.sim.scenarios import faults as scenarios_faults
from penstock.sim.scenarios import fleet as scenarios_fleet
from penstock.sim.scenarios import hedge as scenarios_hedge
from penstock.sim.scenarios import overload as scenarios_overload
from penstock.sim.scenarios.parts import SCENARIOS

__all__ = [
    "SCENARIOS",
    "scenarios_everyday",
    "scenarios_faults",
    "scenarios_fleet",
    "scenarios_hedge",
    "scenarios_overload",
]
