"""What an answer of one model must look like: where its reasoning ends, and where a grammar begins."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.errors import InvalidRequest, Unsupported
from penstock.gateway.models.prepare import begins_reasoning, ends_reasoning
from penstock.gateway.models.served import ServedModel
from penstock.protocol.grammar import Grammar
from penstock.protocol.needs import Constraint
from penstock.protocol.openai import ChatRequest
from penstock.types import Capability

EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}
"""`reasoning_effort`: the share of an answer's tokens that its reasoning may take."""
_MAY_FORWARD = frozenset({Capability.PASS_THROUGH})


def template_extra(request: ChatRequest) -> dict[str, Any] | None:
    """What the chat template is given of a request beside its messages: the effort is a variable of some."""
    effort = getattr(request, "reasoning_effort", None)
    if not isinstance(effort, str):
        return request.chat_template_kwargs
    found: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        found["enable_thinking"] = False
    return found | (request.chat_template_kwargs or {})


def shaped(
    model: ServedModel, request: ChatRequest, prompt: Sequence[int], max_tokens: int, constraint: Constraint
) -> Constraint:
    """The constraint of one model's answer: what it must look like begins behind its reasoning, and a bounded
    reasoning is closed.

    Raises:
        InvalidRequest: the bound makes no sense.
        Unsupported: this model does not reason.
    """
    budget, param = _budget(request, max_tokens)
    if model.reasoning is None:
        if budget and not _forwards(model):
            raise Unsupported(
                f"'{param}' is not supported by the model '{model.name}': it does not reason.",
                param=param,
                code="unsupported_by_model",
            )
        return constraint
    if not (constraint.structured or budget is not None) or ends_reasoning(model, prompt):
        return constraint
    grammar = Grammar(
        form=constraint.form,
        opens_with="" if begins_reasoning(model, prompt) else model.reasoning.open,
        begins_after=model.reasoning.close,
        begins_within=budget,
    )
    return msgspec.structs.replace(constraint, grammar=grammar, param=constraint.param or param)


def _budget(request: ChatRequest, max_tokens: int) -> tuple[int | None, str]:
    """Tokens that the reasoning may take and the parameter that says so; None: as many as it likes."""
    tokens: int | None = getattr(request, "thinking_token_budget", None)
    effort: str | None = getattr(request, "reasoning_effort", None)
    if tokens is not None:
        return tokens, "thinking_token_budget"
    if effort is None:
        return None, ""
    if effort not in EFFORTS:
        raise InvalidRequest(
            f"Invalid value for 'reasoning_effort': '{effort[:64]}'. Supported values are "
            f"{', '.join(repr(each) for each in EFFORTS)}.",
            param="reasoning_effort",
            code="invalid_value",
        )
    return int(max_tokens * EFFORTS[effort]), "reasoning_effort"


def _forwards(model: ServedModel) -> bool:
    """Whether some worker of it is a provider, which makes of the parameter what it likes."""
    return not model.workers.lacking(_MAY_FORWARD)
