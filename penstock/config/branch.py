"""The base class of every part of the config tree."""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65_535)]
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class Branch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the tree: frozen, and closed to keys it does not know."""


Terms = TypeVar("Terms", bound=Branch)


def extended(section: Branch, terms: type[Terms]) -> Terms:
    """The section with the constants that `terms`, a subclass of its type, adds; itself where a caller has
    set those.
    """
    if isinstance(section, terms):
        return section
    shared = [name for name in section.__struct_fields__ if name in terms.__struct_fields__]
    return terms(**{name: getattr(section, name) for name in shared})
