"""What NVIDIA's driver says of its devices (Xids, in the kernel's log), and what a worker does about it.

The table follows NVIDIA's catalog of Xids by class. A number that is not in it is taken for the worst: a
device that says what nobody knows is not computed on. Pure.
"""

import enum
import re
from dataclasses import dataclass


class Remedy(enum.StrEnum):
    """What the worker on the device does."""

    END = "end"
    """Its process ends, its streams move, and it is not started again: the device wants a reset or is
    gone."""
    RESTART = "restart"
    """Its process ends, its streams move, and it is started anew."""
    NOTE = "note"
    """It goes on; people are told."""


@dataclass(slots=True, frozen=True)
class Xid:
    """One line of the driver."""

    device: str
    """PCI domain, bus and device: "0000:3b:00"."""
    code: int
    remedy: Remedy
    text: str


_END = (
    79,  # Fallen off the bus.
    46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158,  # Reset the device.
    48, 74, *range(144, 151),  # Uncorrectable memory errors and links.
    54, 78, 151,  # Power, firmware, virtual machine.
)  # fmt: skip
_RESTART = (8, 11, 13, 25, 31, 32, 39, 40, 41, 60, *range(68, 73), 75, 76, 77, 80, 94)
_NOTE = (
    45,  # Follows another one.
    37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 160, 161,
)  # fmt: skip
REMEDIES: dict[int, Remedy] = {
    **dict.fromkeys(_END, Remedy.END),
    **dict.fromkeys(_RESTART, Remedy.RESTART),
    **dict.fromkeys(_NOTE, Remedy.NOTE),
}
RECOVERY_CHANGED = 154
"""Its text names the action that the device wants now."""
_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(.*)")


def parse_xid(line: str) -> Xid | None:
    """What a line of the kernel's log says of a device; None if it is about something else."""
    found = _LINE.search(line)
    if found is None:
        return None
    code, text = int(found[2]), found[3].strip(" ,")
    remedy = REMEDIES.get(code, Remedy.END)
    if code == RECOVERY_CHANGED:
        remedy = Remedy.NOTE if text.rstrip(".").endswith("(None)") else Remedy.END
    return Xid(found[1].lower().partition(".")[0], code, remedy, text[:200])
