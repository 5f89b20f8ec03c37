"""From a gateway's submission to a request of the scheduler, or to its end with what is wrong with it."""

from penstock.errors import ClientError, InvalidRequest, PenstockError
from penstock.kv.hashing import PUBLIC, token_array
from penstock.protocol.submissions import INT64_MAX, sampling_problem, weight_of
from penstock.protocol.worker import RequestFinished, Submit
from penstock.schedule.request import Request
from penstock.types import FinishReason, Usage


def request_of(message: Submit, vocab_size: int, grammar: object) -> Request:
    """The scheduler's view of a submission.

    Raises:
        InvalidRequest: the prompt has tokens that this model lacks, or a parameter is out of its range
            (either would break the whole batch), or the namespace is none that a tenant may have.
    """
    try:
        tokens, resumed = token_array(message.prompt), token_array(message.resumed)
    except ValueError:
        raise InvalidRequest("the prompt is not a whole number of tokens", param="prompt") from None
    for name, known in (("prompt", tokens), ("resumed", resumed)):
        if known and not 0 <= min(known) <= max(known) < vocab_size:
            raise InvalidRequest(f"the {name} has token ids outside 0..{vocab_size - 1}", param=name)
    if message.inputs:
        raise InvalidRequest("this model generates text, and has no vectors", param="inputs")
    if resumed and resumed[-1] in message.sampling.stop_token_ids:
        raise InvalidRequest("what was resumed has come to its stop token", param="resumed")
    if problem := sampling_problem(message.sampling, vocab_size):
        param, reason = problem
        raise InvalidRequest(reason, param=param)
    if not -INT64_MAX <= message.priority <= INT64_MAX:
        raise InvalidRequest("priority is out of range", param="priority")
    if not 0 <= message.public_tokens <= len(tokens):
        raise InvalidRequest(
            f"public_tokens is {message.public_tokens}, but the prompt has {len(tokens)}",
            param="public_tokens",
        )
    if message.cache_salt == PUBLIC:
        raise InvalidRequest("this salt is reserved", param="cache_salt")
    return Request(
        request_id=message.request_id,
        tokens=tokens + resumed,
        num_resumed=len(resumed),
        sampling=message.sampling,
        salt=message.cache_salt,
        public_tokens=message.public_tokens,
        priority=message.priority,
        fairness_key=message.fairness_key,
        fairness_weight=weight_of(message.fairness_weight),
        takes_row=message.takes_row,
        grammar=grammar,
    )


def failed_by(error: PenstockError) -> RequestFinished:
    """The end of a request that had none of the engine."""
    return RequestFinished(
        reason=FinishReason.ERROR,
        usage=Usage(),
        error=str(error),
        error_kind=type(error).__name__,
        param=error.param if isinstance(error, ClientError) else None,
    )
