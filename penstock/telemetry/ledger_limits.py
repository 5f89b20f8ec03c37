"""Sizes and intervals of the usage ledger: constants, which only tests change."""

from dataclasses import dataclass

SEGMENTS_MIN = 4
"""Journal files that there must be room for: one written, one ready, and some that are being delivered."""


@dataclass(slots=True, frozen=True, kw_only=True)
class LedgerLimits:
    """The same for every gateway process."""

    deliver_ms: int = 250
    """How often the journal is brought to the database."""
    deliver_records_max: int = 2_000
    """Records in one transaction."""
    segment_bytes: int = 4 * 1024 * 1024
    """Size of one journal file, which is set aside when it is made."""
    segment_age_s: float = 3600.0
    """A journal file is not written to for longer than this; 0 for as long as it has room."""
    journal_bytes_max: int = 256 * 1024 * 1024
    """Journal files of one gateway process together: by how much the database may lag behind."""
    buffer_bytes_max: int = 8 * 1024 * 1024
    """Held in memory while the disk takes nothing; records beyond it are lost, and counted."""

    def __post_init__(self) -> None:
        assert self.journal_bytes_max >= SEGMENTS_MIN * self.segment_bytes


LEDGER_LIMITS = LedgerLimits()
