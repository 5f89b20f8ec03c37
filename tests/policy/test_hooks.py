"""Of the plug-ins' hooks those are called that do something."""

from penstock.policy.extras.hooks import Extra, Hooks
from penstock.policy.request import Request


class Counts(Extra):
    """Has two of the hooks."""

    __slots__ = ("began", "left_ns")

    def __init__(self) -> None:
        self.began, self.left_ns = 0, 0

    def started(self, now_ns: int, request: Request) -> None:
        self.began += 1

    def next_ns(self) -> int | None:
        return 7


class CountsMore(Counts):
    """Has those by inheritance, and one more."""

    __slots__ = ()

    def left(self, request: Request) -> None:
        self.left_ns += 1


def test_a_hook_that_does_nothing_is_not_called() -> None:
    one, other = Counts(), CountsMore()
    hooks = Hooks()
    for each in (other, one, Extra()):
        hooks.put(0, each)
    assert hooks.started == [one.started, other.started]
    assert [next_ns() for next_ns in hooks.next_ns] == [7, 7]
    assert hooks.left == [other.left]
    idle = set(Hooks.__slots__) - {"_extras", "started", "next_ns", "left"}
    assert not any(getattr(hooks, name) for name in idle)
    assert idle | {"started", "next_ns", "left"} == {name for name in vars(Extra) if not name.startswith("_")}
