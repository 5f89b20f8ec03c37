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
    reasoning is closed. Calls of tools obey their schemas.

    Raises:
        InvalidRequest: the bound makes no sense.
        Unsupported: this model does not reason.
    """
    budget, param = _budget(request, max_tokens)
    marks = model.reasoning
    if marks is None and budget and not forwards(model):
        raise Unsupported(
            f"'{param}' is not supported by the model '{model.name}': it does not reason.",
            param=param,
            code="unsupported_by_model",
        )
    calls = None if constraint.structured else call_grammar(model, request)
    is_bounded = bool(constraint.structured) or budget is not None
    if calls is None and not is_bounded:
        return constraint
    grammar = calls or Grammar(form=constraint.form)
    if marks is not None and not ends_reasoning(model, prompt):
        grammar = msgspec.structs.replace(
            grammar,
            opens_with="" if begins_reasoning(model, prompt) else marks.open,
            begins_after=marks.close,
            begins_within=budget,
        )
    elif calls is None:
        return constraint
    param = constraint.param or ("tools" if calls is not None else param)
    return msgspec.structs.replace(constraint, grammar=grammar, param=param)


def call_grammar(model: ServedModel, request: ChatRequest) -> Grammar | None:
    """What holds each call of an answer to the schemas of its tools, from the call's mark on; None: there is
    nothing of the kind.

    A promise where a tool is `strict`; else as far as the schemas can be enforced.
    """
    syntax = model.tool_format
    tools = [tool.function for tool in request.tools or () if tool.function is not None]
    if not tools or request.tool_choice not in (None, "auto"):
        return None
    is_strict = holds_calls(request)
    asked = {
        "format": syntax.name,
        "tools": [{"name": tool.name, "parameters": tool.parameters} for tool in tools],
        "several": request.parallel_tool_calls is not False,
    }
    try:
        form = msgspec.json.encode({"calls": asked})
    except RecursionError:
        if not is_strict:
            return None
        raise InvalidRequest("Invalid 'tools': a schema is nested too deeply.", param="tools") from None
    return Grammar(
        form=form,
        call_mark=syntax.call_mark(tool.name for tool in tools),
        ends_with_calls=syntax.ends_answer,
        is_optional=not is_strict,
    )


def holds_calls(request: ChatRequest) -> bool:
    """Whether what is shown as a call must obey its schema: a tool is `strict`."""
    return any(tool.function is not None and tool.function.strict for tool in request.tools or ())


def _budget(request: ChatRequest, max_tokens: int) -> tuple[int | None, str]:
    """Tokens that the reasoning may take and the parameter that says so; None: as many as it likes."""
    tokens: int | None = getattr(request, "thinking_token_budget", None)
    effort: str | None = getattr(request, "reasoning_effort", None)
    if tokens is not None:
        return min(tokens, max_tokens), "thinking_token_budget"
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


def forwards(model: ServedModel) -> bool:
    """Whether some worker of it is a provider, which makes of the parameter what it likes."""
    return not model.workers.lacking(_MAY_FORWARD)
