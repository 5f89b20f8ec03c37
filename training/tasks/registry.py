"""All tasks, and each one's share of the training exchanges."""

from __future__ import annotations

from training.tasks.about import about
from training.tasks.arithmetic import arithmetic
from training.tasks.base import Generator
from training.tasks.extract import extract
from training.tasks.facts import facts
from training.tasks.lists import lists
from training.tasks.oneliners import oneliners
from training.tasks.smalltalk import smalltalk
from training.tasks.strings import strings
from training.tasks.tools import tool_answer, tool_call_task
from training.tasks.units import units
from training.tasks.unknown import unknown

TASKS: dict[str, Generator] = {
    "about": about,
    "smalltalk": smalltalk,
    "arithmetic": arithmetic,
    "facts": facts,
    "strings": strings,
    "units": units,
    "extract": extract,
    "tool_call": tool_call_task,
    "tool_answer": tool_answer,
    "python": oneliners,
    "lists": lists,
    "unknown": unknown,
}

Shares = dict[str, float]

# How often each task comes, at first and later: what is learned by heart early makes room for what must be
# computed.
FIRST_SHARES: Shares = {
    "about": 7, "smalltalk": 7, "arithmetic": 20, "facts": 9, "strings": 17, "units": 9, "extract": 8,
    "tool_call": 5, "tool_answer": 2, "python": 6, "lists": 5, "unknown": 4,
}  # fmt: skip
LATER_SHARES: Shares = {
    "about": 3, "smalltalk": 4, "arithmetic": 36, "facts": 4, "strings": 30, "units": 11, "extract": 5,
    "tool_call": 4, "tool_answer": 2.5, "python": 2, "lists": 12, "unknown": 2,
}  # fmt: skip
