"""Stop strings: where an answer ends although the model would go on.

A stop string may be spread over any number of deltas, so text that could still become one is held
back. The strings are one Aho-Corasick automaton (Aho and Corasick, 1975): each character moves it
once, and its state says how much must be held.
"""

from collections.abc import Sequence


class StopChecker:
    """Watches one stream for its stop strings. The match that is complete first wins.

    Of two that are complete at the same character the longer one wins, for it began earlier. So
    the result does not depend on how the text was cut into deltas.
    """

    __slots__ = ("_done", "_first", "_held", "_include", "_node", "_nodes")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._nodes = _automaton(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._include = include_stop
        self._node = self._nodes
        self._held = ""
        self._done = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return (text that is safe to show, the stop string that matched or None).

        After a match the checker is spent: the text after it is dropped, and `finish` has nothing.
        """
        assert not self._done, "pushed after a match"
        if not self._held and self._first.isdisjoint(text):
            return text, None  # The common case, at C speed.
        return self._scan(text)

    def finish(self) -> str:
        """The held text: the stream is over, so it can become no stop string any more."""
        held, self._held = self._held, ""
        self._node = self._nodes
        return held

    def _scan(self, text: str) -> tuple[str, str | None]:
        node, root = self._node, self._nodes
        whole = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            while char not in node.next and node is not root:
                node = node.fallback
            node = node.next.get(char, root)
            if node.match:
                self._done, self._held = True, ""
                end = position if self._include else position - len(node.match)
                return whole[:end], node.match
        self._node = node
        cut = len(whole) - node.depth
        self._held = whole[cut:]
        return whole[:cut], None


class _Node:
    """A state: the longest suffix of the text that begins some stop string, `depth` characters of it."""

    __slots__ = ("depth", "fallback", "match", "next")

    def __init__(self, depth: int, fallback: "_Node | None" = None) -> None:
        self.next: dict[str, _Node] = {}
        self.depth = depth
        self.fallback: _Node = fallback or self
        self.match = ""
        """The longest stop string that is a suffix of this state's text."""


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        assert stop, "an empty stop string matches everything"
        node = root
        for char in stop:
            if char not in node.next:
                node.next[char] = _Node(node.depth + 1, root)
            node = node.next[char]
        node.match = stop
    _link(root)
    return root


def _link(root: _Node) -> None:
    """Breadth first: where to go on when the next character does not fit, and what that already matches."""
    level = [node for _, node in sorted(root.next.items())]
    while level:
        for node in level:
            for char, child in node.next.items():
                back = node.fallback
                while char not in back.next and back is not root:
                    back = back.fallback
                child.fallback = back.next.get(char, root)
                child.match = child.match or child.fallback.match
        level = [child for node in level for child in node.next.values()]
