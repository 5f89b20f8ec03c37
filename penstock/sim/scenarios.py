"""The scenarios by name: every failure row and follow-up question of the requirement, and the everyday ones.

All are small (a few thousand steps), so that each takes seconds; `--set workers=... --set load=...` makes them larger. Importing
this module registers them all.
"""

from penstock.sim import (
    scenarios_everyday,
    scenarios_faults,
    scenarios_fleet,
    scenarios_hedge,
    scenarios_overload,
)
from penstock.sim.scenario_parts import SCENARIOS

__all__ = [
    "SCENARIOS",
    "scenarios_everyday",
    "scenarios_faults",
    "scenarios_fleet",
    "scenarios_hedge",
    "scenarios_overload",
]
