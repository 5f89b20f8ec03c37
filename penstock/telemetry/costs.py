"""Where the machines' money went: by model from the metrics of all gateway processes, and by day on disk.

    bill = requests + platform + idle + reserve

`DIRECTORY/DAY-INSTANCE.json` has the sums of one UTC day as one server saw them, written again every few
seconds; a server that is killed loses those. Files of one day add up: servers that share a ledger's
directory have one account. Amounts are in the currency of the price list.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.telemetry.pages import label_of, parsed

_PART = {b"busy": "busy", b"idle": "idle", b"reserve": "reserve"}
_COUNTERS = {
    b"penstock_accelerator_charged_total": "charged",
    b"penstock_accelerator_floor_total": "floor",
    b"penstock_prompt_tokens_total": "tokens",
    b"penstock_generated_tokens_total": "tokens",
}
COST_METRICS = ("penstock_accelerator_cost_total", *(name.decode() for name in _COUNTERS))
"""The metrics that `cost_accounts` reads."""
_DAY_S = 86_400
COSTS_DIRECTORY = "costs"
"""The folder of a ledger's directory."""


class CostSums(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The counts of one model's workers."""

    busy: float = 0.0
    """Cost of the time in which they had requests."""
    idle: float = 0.0
    reserve: float = 0.0
    charged: float = 0.0
    """Of `busy`, what requests paid."""
    floor: float = 0.0
    tokens: float = 0.0
    """Prompts and answers."""

    def add(self, other: "CostSums") -> None:
        """Put another one to this one."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def since(self, before: "CostSums") -> "CostSums":
        """The growth since then. Of several gateway processes the one that counted most may be gone: a number
        that fell has not grown.
        """
        grown = CostSums()
        for name in self.__struct_fields__:
            now, then = getattr(self, name), getattr(before, name)
            setattr(grown, name, max(0.0, now - then))
        return grown


Days = Mapping[tuple[str, str], CostSums]
"""By day ("2026-11-21") and model."""


class CostAccount(msgspec.Struct, frozen=True, kw_only=True):
    """One model's bill, and its four parts."""

    model: str
    bill: float
    requests: float
    """The price that requests paid: the ledger's `accelerator_cost_micros`."""
    platform: float
    """Of the time with work, what no request paid: probes, attempts that lost or whose worker died."""
    idle: float
    """In service without work."""
    reserve: float
    """Starting, loading, doubted or taken out of service."""
    floor: float
    """The least that the work would have cost (`planning.roofline.CostFloor`); 0: the workers do not
    tell."""
    tokens: int
    per_million: float | None
    """The cost of a million tokens of prompts and answers; null: there were none."""
    floor_per_million: float | None
    over_floor: float | None
    """How many times the floor the bill is."""


def account(model: str, sums: CostSums) -> CostAccount:
    """The account of one model."""
    bill, tokens = sums.busy + sums.idle + sums.reserve, sums.tokens
    return CostAccount(
        model=model,
        bill=bill,
        requests=sums.charged,
        platform=sums.busy - sums.charged,
        idle=sums.idle,
        reserve=sums.reserve,
        floor=sums.floor,
        tokens=round(tokens),
        per_million=bill / tokens * 1e6 if tokens else None,
        floor_per_million=sums.floor / tokens * 1e6 if tokens and sums.floor else None,
        over_floor=bill / sums.floor if sums.floor else None,
    )


def cost_sums(page: bytes) -> dict[str, CostSums]:
    """The sums of a page of metrics, by model: of those whose workers have a price."""
    families = parsed(page)
    found = dict[str, CostSums]()
    for series, value in families.get(b"penstock_accelerator_cost_total", ([], {}, False))[1].items():
        sums = found.setdefault(_model(series), CostSums())
        part = _PART[label_of(series, b"part")]
        setattr(sums, part, getattr(sums, part) + value)
    for name, field in _COUNTERS.items():
        for series, value in families.get(name, ([], {}, False))[1].items():
            if (sums := found.get(_model(series))) is not None:
                setattr(sums, field, getattr(sums, field) + value)
    return found


def cost_accounts(page: bytes) -> list[CostAccount]:
    """The accounts that a page of metrics tells."""
    return [account(model, sums) for model, sums in sorted(cost_sums(page).items())]


def _model(series: bytes) -> str:
    return label_of(series, b"model").decode().replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\")


class CostDays:
    """The sums of this day, as this server sees them. `take` is cheap; `write` blocks on the disk."""

    def __init__(self, directory: Path, clock: Clock, *, keep_days: int) -> None:
        """`keep_days` 0 keeps all."""
        self._directory, self._clock, self._keep_days = directory, clock, keep_days
        self._seen: dict[str, CostSums] = {}
        self._days: dict[str, dict[str, CostSums]] = {}
        """Today, and a day before that is not written yet."""
        self.has_changes = False
        """Something was taken and is not written yet."""
        self._name = f"{os.getpid()}-{clock.wall_ns():x}"

    def take(self, page: bytes) -> bool:
        """Count what has grown on the page; whether anything has."""
        now, before = cost_sums(page), self._seen
        self._seen = now
        if not now:
            return False
        today = self._days.setdefault(_day(self._clock.wall_ns() // NS_PER_S), {})
        for model, sums in now.items():
            today.setdefault(model, CostSums()).add(sums.since(before.get(model, CostSums())))
        self.has_changes = True
        return True

    def write(self) -> None:
        """Put it on the disk.

        Raises:
            OSError: it cannot be written.
        """
        self.has_changes = False  # Of what does not reach the disk the next time has all.
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for day in sorted(self._days):
            path = self._directory / f"{day}-{self._name}.json"
            is_new = not path.exists()
            draft = path.with_suffix(".part")
            draft.write_bytes(msgspec.json.encode(self._days[day]))
            draft.replace(path)
            if is_new:
                self._remove_old()
        for day in sorted(self._days)[:-1]:
            del self._days[day]

    def _remove_old(self) -> None:
        if self._keep_days:
            oldest = _day(self._clock.wall_ns() // NS_PER_S - self._keep_days * _DAY_S)
            for path in self._directory.glob("*.json"):
                if path.name[:10] < oldest:
                    with contextlib.suppress(OSError):  # Another server has removed it.
                        path.unlink()


def read_days(directory: Path) -> Days:
    """The sums of all servers that wrote there. A file that cannot be read is left out."""
    found = dict[tuple[str, str], CostSums]()
    for path in sorted(directory.glob("*.json")):
        try:
            models = msgspec.json.decode(path.read_bytes(), type=dict[str, CostSums])
        except (OSError, msgspec.MsgspecError):
            continue
        for model, sums in models.items():
            found.setdefault((path.name[:10], model), CostSums()).add(sums)
    return found


COST_GROUPS = ("model", "day", "month")


def cost_rows(
    days: Days, by: Sequence[str], since: str, until: str, model: str | None
) -> list[tuple[tuple[str, ...], CostAccount]]:
    """The accounts of the machines' cost by group (`COST_GROUPS`), of the days from `since` to before `until`
    (empty: all).
    """
    groups = dict[tuple[str, ...], list[CostSums]]()
    for (day, name), sums in days.items():
        if since <= day and (not until or day < until) and model in (None, name):
            facts = {"model": name, "day": day, "month": day[:7]}
            groups.setdefault(tuple(facts[group] for group in by), []).append(sums)
    return [(group, account("", summed(parts))) for group, parts in sorted(groups.items())]


def summed(rows: Iterable[CostSums]) -> CostSums:
    """All of them together."""
    total = CostSums()
    for each in rows:
        total.add(each)
    return total


def _day(wall_s: int) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d")
