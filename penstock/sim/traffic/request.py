"""One request of a simulated workload, and what became of it."""

import msgspec

from penstock.policy.flow import Outcome

RETRY_MARK = "^"
"""Ends the id of a request that comes again, once for each time."""


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A piece of a prompt: the first `tokens` tokens of the content with this number.

    Two prompts that begin with the same segments have the same tokens there, and contents with different
    numbers have different ones: a system prompt, a document, a turn of a conversation. The answer of a
    request is a content too (`SimRequest.answer`), so that a next turn can have it in its prompt.
    """

    content: int
    """0 to 2^60."""
    tokens: int


class SimRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One request, as a workload makes it.

    Open loop: it comes at its time, whatever became of those before.
    """

    id: str
    at_ns: int
    tenant: str = ""
    """Of those that the world knows; any other is made up with the defaults."""
    model: str = "model"
    prompt: tuple[Segment, ...]
    answer: int = 0
    """The content of its answer, for the prompts of later requests; 0 is one that no other has."""
    output_tokens: int
    """Tokens that the model generates before it stops by itself, the stop token included."""
    max_tokens: int = 0
    """What the client allows; 0 is `output_tokens` (and then the answer ends by length)."""
    public_tokens: int = 0
    """Leading prompt tokens that are nobody's: all tenants share their cached blocks."""
    session: str = ""
    adapter: str = ""
    band: str = ""
    """Priority band; empty is the tenant's."""
    region: str = ""
    """Where the client is; empty is the first."""
    cancel_at_ns: int = 0
    """When the client leaves, whatever it has got by then; 0: it stays."""
    patience_ns: int = 0
    """How long it waits for a first token before it leaves; 0: for ever."""
    first_token_ns: int = 0
    """The bound for its first token that it tells the gateway; 0 says nothing."""
    retries: int = 0
    """How often its client comes again after it was refused."""
    retry_ns: int = 0
    """After how long, whatever it was told; 0: when it was told to."""
    poison: bool = False
    """It brings down every worker that computes its prompt."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(segment.tokens for segment in self.prompt)


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What became of one request, as its client saw it. Times are since the start of the simulation."""

    id: str
    tenant: str
    model: str
    """That answered, or was asked."""
    band: str
    outcome: Outcome
    reason: str = ""
    """Which part refused it, why it was evicted, or the error's name."""
    at_ns: int
    first_ns: int = -1
    """First token at the client; -1: none came."""
    end_ns: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    attempts: int = 0
    migrations: int = 0
    """Of the attempts, those that went on behind what a lost worker had given."""
    worker: str = ""
    queue_ns: int = 0
    """In the gateway's queue."""
    retry_after_ns: int = 0
    """When it was told to come again, from its refusal on; 0: it was not."""

    @property
    def is_retry(self) -> bool:
        """Whether its client was refused before."""
        return self.id.endswith(RETRY_MARK)

    @property
    def ttft_ns(self) -> int:
        """Time to first token; -1: none came."""
        return self.first_ns - self.at_ns if self.first_ns >= 0 else -1

    @property
    def tpot_ns(self) -> int:
        """Mean time per further token; 0 with less than two."""
        further = self.completion_tokens - 1
        return (self.end_ns - self.first_ns) // further if further > 0 and self.first_ns >= 0 else 0


def unreachable(request: SimRequest, now_ns: int) -> RequestRecord:
    """What became of a request whose client found no gateway."""
    return RequestRecord(
        id=request.id,
        tenant=request.tenant,
        model=request.model,
        band=request.band,
        outcome=Outcome.REJECTED,
        reason="no_gateway",
        at_ns=request.at_ns,
        end_ns=now_ns,
    )
