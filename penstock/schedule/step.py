"""A plan in the making: what the step has taken of its budget so far."""

from penstock.schedule.plan import NewRow, RowWork, StepPlan
from penstock.schedule.request import Request


class StepBuilder:
    """Collects one step's work. Never holds more tokens than its budget, nor a row twice."""

    __slots__ = ("_new_rows", "_work", "budget", "scored_budget")

    def __init__(self, step_tokens: int, scored_tokens: int) -> None:
        self.budget = step_tokens
        """Tokens that may still be added."""
        self.scored_budget = scored_tokens
        """Tokens with a log-probability each that may still be added."""
        self._new_rows: list[NewRow] = []
        self._work: list[RowWork] = []

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._work)

    def room(self, request: Request) -> int:
        """How many of the request's pending tokens the step may take. Logits of whole chunks are dear."""
        tokens = min(request.num_pending, self.budget)
        return min(tokens, self.scored_budget) if request.scores_next else tokens

    def add(self, request: Request, num_tokens: int, blocks: tuple[int, ...]) -> None:
        """Compute the request's next `num_tokens` tokens, after adding `blocks` to its table."""
        computed, scores = request.num_computed, request.scores_next
        samples = computed + num_tokens == len(request.tokens)
        self.budget -= num_tokens
        self.scored_budget -= num_tokens * scores
        assert self.budget >= 0, "over the token budget"
        assert self.scored_budget >= 0, "more log-probabilities than there are rows of logits"
        self._work.append(RowWork(request.row, computed, num_tokens, samples, blocks, scores))

    def add_new(self, request: Request, num_tokens: int, blocks: tuple[int, ...]) -> None:
        """The same for a request that (re)enters the batch: the runner is told all about it."""
        self._new_rows.append(
            NewRow(
                request.request_id, request.row, tuple(request.tokens), request.num_prompt, request.sampling
            )
        )
        self.add(request, num_tokens, blocks)

    def drop(self, request: Request) -> None:
        """Take a running request's work out again, if it has any: it is being preempted."""
        for index, work in enumerate(self._work):
            if work.row == request.row:
                self.budget += work.num_tokens
                self.scored_budget += work.num_tokens * work.scores
                del self._work[index]
                return

    def build(self, step: int, freed_rows: tuple[int, ...]) -> StepPlan:
        """The finished plan."""
        return StepPlan(step, tuple(self._new_rows), tuple(self._work), freed_rows)
