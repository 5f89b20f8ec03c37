"""Which worker of a model a request goes to: the section `routing.placement`."""

from typing import Literal

from penstock.config.branch import Branch


class PlacementConfig(Branch, frozen=True, kw_only=True):
    """Which worker a request goes to: filter, score, pick. docs/routing.md has the story."""

    policy: Literal["ttft", "weighted", "least_loaded"] = "ttft"
    """"ttft": the least expected time to first token. "weighted": a weighted sum of four marks.
    "least_loaded": free streams alone."""
