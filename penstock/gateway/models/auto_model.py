"""`model: "auto"`: from a parsed request to what the complexity router wants to know, and to its choice."""

from collections.abc import Callable

from penstock.config.routing import AUTO, RoutingConfig
from penstock.errors import NotFound
from penstock.policy.extras.complexity import ComplexityRouter, Features
from penstock.policy.placement.pick import ComplexityChoice
from penstock.policy.tenant import Tenant, check_model, may_use_model
from penstock.protocol.openai import ChatRequest, CompletionRequest, GenerationRequest, Message, ModelCard

_CHARS_PER_TOKEN = 3
"""For asking whether a conversation fits a model before its tokenizer has seen it: rather too many tokens
than too few."""
_TOKEN_CHARS = 4
"""The characters that a prompt of token ids counts for each."""

MaxLength = Callable[[str], int | None]
"""A model's context in tokens: 0 if it is not known yet, None if it is not ready or not there."""


class AutoModels:
    """Chooses a model for requests that name none."""

    def __init__(self, routing: RoutingConfig, *, created_s: int = 0) -> None:
        assert routing.auto, "without models there is no auto"
        self.name = AUTO
        self.models = tuple(model.model for model in routing.auto)
        self._router = ComplexityRouter(routing.auto)
        self._without_tools = {route.model for route in routing.models if not route.tools}
        self._created_s = created_s

    def card(self) -> ModelCard:
        """Its entry in `/v1/models`."""
        return ModelCard(id=self.name, created=self._created_s)

    def may_use(self, tenant: Tenant) -> bool:
        """Whether any of its models is on the tenant's allowlist."""
        return any(may_use_model(tenant, model) for model in self.models)

    def choose(self, request: GenerationRequest, tenant: Tenant, max_length: MaxLength) -> ComplexityChoice:
        """The model for a request. One that is not ready, or too small, is taken only if no other may answer.

        Raises:
            Forbidden: the tenant may use none of them.
            NotFound: none of them can answer it, with its tools.
        """
        if not self.may_use(tenant):
            check_model(tenant, self.models[0])
        features = features_of(request, tier=tenant.tier)
        needs_tools = features.num_tools > 0
        num_tokens = features.num_chars // _CHARS_PER_TOKEN + _asked_tokens(request)

        def can(model: str) -> bool:
            return may_use_model(tenant, model) and not (needs_tools and model in self._without_tools)

        def fits(model: str) -> bool:
            length = max_length(model)
            return length is not None and (not length or num_tokens <= length)

        choice = self._router.choose(features, lambda model: can(model) and fits(model))
        choice = choice or self._router.choose(features, can)
        if choice is None:
            raise NotFound(
                f"No model of '{self.name}' that you may use can call tools.",
                param="tools",
                code="model_not_found",
            )
        return choice


def features_of(request: GenerationRequest, *, tier: str) -> Features:
    """The features that the router looks at."""
    if isinstance(request, ChatRequest):
        return _chat_features(request, tier)
    assert isinstance(request, CompletionRequest)
    texts, num_ids = _prompt_texts(request.prompt)
    return Features(texts=texts, num_chars=sum(map(len, texts)) + num_ids * _TOKEN_CHARS, tier=tier)


def _chat_features(request: ChatRequest, tier: str) -> Features:
    texts: list[str] = []
    num_chars = num_results = 0
    for message in request.messages:
        text = _text_of(message)
        num_chars += len(text)
        if message.role == "user":
            texts.append(text)
        elif message.role == "tool":
            num_results += 1
    uses_tools = request.tool_choice != "none"
    return Features(
        texts=texts,
        num_chars=num_chars,
        num_tools=len(request.tools or ()) if uses_tools else 0,
        num_tool_results=num_results,
        tier=tier,
    )


def _text_of(message: Message) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or "" for part in content)


def _prompt_texts(prompt: str | list[str | int | list[int]]) -> tuple[list[str], int]:
    """The texts of a plain prompt, and how many token ids stand beside them."""
    if isinstance(prompt, str):
        return [prompt], 0
    texts = [each for each in prompt if isinstance(each, str)]
    return texts, sum(len(each) if isinstance(each, list) else not isinstance(each, str) for each in prompt)


def _asked_tokens(request: GenerationRequest) -> int:
    asked = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    return asked or request.max_tokens or 0
