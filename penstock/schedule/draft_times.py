"""The time that drafts add to a step of a model whose guesses cost nothing: more for the first than for any
further one.

    time of a step with k drafts = (time without any) x (1 + first + each x (k - 1))

The first makes a row into a chunk, draws at several of its places and looks which of them are right: work
that a lone row's step feels and a full batch's hardly does. So there is a law for each size of batch, in
powers of two.

The linear law (`step_time.py`) has no such jump, and takes it for the price of tokens, or of any step. It
does know what a longer context costs: so times count as parts of what it says of the step without drafts,
and steps that had none tell by how much it errs. Where none came for long, nothing is learned.

Learned by medians (an estimate moves by a step towards what was seen, however far that is): on a busy
machine single steps take ten times their time. The steps shrink, so that the first few count most.
"""

FIRST = 0.1
"""The share that the first draft adds beyond a token's, before any step had drafts: little, for it is
learned by trying."""
_EXPECTED_PART = 0.5
"""Of what a token adds by the linear law, which learns it from prompts too, a further draft is expected to
add."""
_RATE_MAX, _RATE_MIN = 0.2, 0.01
"""By how much the first observation of a size may move an estimate, and the later ones."""
_EACH_PART = 1 / 4
"""Of that for each further draft of a step, the most that the price of one moves."""
_DRAFTS_MAX = 8
_UNCHECKED_MAX = 32
"""Steps with drafts in a row that are learned from: in more of them the law takes the jump for its own."""


class _Size:
    """One size of batch: the time of a step without drafts over the predicted one, and the shares of it that
    they add.
    """

    __slots__ = ("each", "first", "num_drafted", "num_plain", "num_unchecked", "plain")

    def __init__(self) -> None:
        self.plain, self.first, self.each = 1.0, FIRST, 0.0
        self.num_plain = self.num_drafted = 0
        self.num_unchecked = 0  # Since the last step without drafts.


class DraftTimes:
    """One engine's."""

    __slots__ = ("_sizes",)

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def of(self, num_rows: int, expected: float) -> tuple[float, float]:
        """(what the first draft adds, what each further one does), as shares of the time of a step without
        any; `expected`: what a token does, where no step of that size had drafts.
        """
        size = self._sizes.get(num_rows.bit_length())
        if size is None or not size.num_drafted:
            return FIRST + expected, expected * _EXPECTED_PART
        return size.first, size.each

    def observe_plain(self, num_rows: int, ratio: float) -> None:
        """A step in which all rows decode, without drafts, took `ratio` times its predicted time."""
        assert num_rows > 0 < ratio, "a step has rows and takes time"
        size = self._sizes.get(num_rows.bit_length())
        if size is None:
            size = self._sizes[num_rows.bit_length()] = _Size()
        size.num_plain, size.num_unchecked = size.num_plain + 1, 0
        size.plain *= 1 + _rate(size.num_plain) * _sign(ratio - size.plain)

    def observe(self, num_rows: int, num_drafts: int, ratio: float, expected: float) -> None:
        """One with drafts took `ratio` times what is predicted without any; `expected`: see `of`."""
        assert num_drafts > 0, "a step with drafts has some"
        size = self._sizes.get(num_rows.bit_length())
        if size is None or size.num_unchecked == _UNCHECKED_MAX:
            return  # How long such a step takes without drafts is not known.
        size.num_unchecked += 1
        if not size.num_drafted:
            size.first, size.each = FIRST + expected, expected * _EXPECTED_PART
        size.num_drafted += 1
        more = num_drafts - 1
        over = _sign(ratio / size.plain - 1 - size.first - size.each * more)
        rate = _rate(size.num_drafted) * over
        size.first = max(size.first + rate, 0.0)
        size.each = max(size.each + rate * _EACH_PART * min(more, _DRAFTS_MAX) / _DRAFTS_MAX, 0.0)


def _rate(count: int) -> float:
    assert count > 0, "the first observation is counted"
    return max(_RATE_MAX / count, _RATE_MIN)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
