"""Dates that exist, as RFC 3339 (5.7) wants them of `date` and `date-time`: llguidance's own automata know
the lengths of months, but not leap years, and have a year 0 and leap seconds, which validators refuse.
"""

import json
from typing import Any, cast

from penstock.engine.grammar.bounds import schemas_in

_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9][0-9]|[1-9][0-9][0-9][0-9])"
_LEAP_YEAR = "([0-9][0-9](0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_LEAP_YEAR}-02-29|{_YEAR}-(02-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-[0-9][0-9]))"
_SECONDS = "[0-9][0-9]:[0-9][0-9]:[0-5]"
_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]{_SECONDS}", "time": f"^{_SECONDS}"}
"""What holds beside llguidance's automaton of the format."""


def with_real_dates(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, whose dates and times are such that every validator takes them."""
    if not any(_is_date(node) for node in schemas_in(schema)):
        return schema
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for node in list(schemas_in(copy)):
        if _is_date(node):
            pattern = _PATTERNS[node["format"]]
            if "pattern" not in node:
                node["pattern"] = pattern
            else:
                held = cast(list[object], node["allOf"]) if isinstance(node.get("allOf"), list) else []
                node["allOf"] = [*held, {"type": "string", "pattern": pattern}]
    return copy


def _is_date(node: dict[str, Any]) -> bool:
    """A `format` says nothing of values that are no strings."""
    return node.get("format") in _PATTERNS if isinstance(node.get("format"), str) else False
