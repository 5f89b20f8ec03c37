"""Keys that the configuration no longer has, and what became of each."""

import re
from collections.abc import Iterator, Mapping
from typing import cast

from penstock.config import fleet, flow, ledger, routing, tenancy, tree

SECTIONS = (tree, fleet, flow, routing, tenancy, ledger)
"""The files that declare sections of the configuration, each with its retired keys."""
RETIRED: Mapping[str, str] = {path: why for module in SECTIONS for path, why in module.RETIRED.items()}
"""Dotted path -> sentence, which names settings in backticks. `[]` stands for an entry of a list, `section.*`
for a section that is gone: for the section itself, and for its keys without a sentence of their own."""


def retired(path: str, value: object, known: Mapping[str, str] = RETIRED) -> Iterator[str]:
    """One line for the key at `path`, or for each key below it, that was a setting once."""
    if sentence := _sentence(path, known):
        yield f"`{path}` is no longer a setting: {sentence}"
        return
    below = cast(dict[object, object], value) if isinstance(value, dict) else {}
    found = [line for key, item in below.items() for line in retired(f"{path}.{key}", item, known)]
    if not found and (sentence := _sentence(f"{path}.*", known)):
        found = [f"`{path}` is no longer a section: {sentence}"]
    yield from found


def _sentence(path: str, known: Mapping[str, str]) -> str | None:
    """What became of a key: its own sentence, else its section's."""
    plain = re.sub(r"\[\d+\]", "[]", path)
    return known.get(plain) or known.get(f"{plain.rpartition('.')[0]}.*")
