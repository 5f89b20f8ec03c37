"""The models that this gateway serves, by the name that clients use.

Which leading tokens of a prompt are public: what an operator declared in `models[].public_prefixes`.

Tenants' KV caches are apart, so that no tenant learns from a fast answer what others have asked. A system
prompt that the operator himself publishes is no such secret: KV blocks that hold nothing but its tokens are
shared by all. Only tokens that equal the operator's, from the very first one, are ever called public,
whatever a caller sends.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.config.routing import EnsembleConfig, RoutingConfig
from penstock.errors import ConfigError, InvalidRequest, NotFound, Unsupported, WorkerUnavailable
from penstock.fleet.registry import RouteWorkers
from penstock.gateway.models.rollouts import RolloutTable
from penstock.policy.contracts import ModelFacts
from penstock.policy.placement.pick import ComplexityChoice
from penstock.policy.rollout.dealing import Assigned
from penstock.policy.tenant import (
    ANONYMOUS,
    Tenant,
    check_adapter,
    check_model,
    may_use_adapter,
    may_use_model,
)
from penstock.protocol.openai import CallerLimits, ChatRequest, GenerationRequest, ModelCard
from penstock.protocol.worker import ModelInfo
from penstock.rng import fresh_key
from penstock.text.chat import ChatTemplate
from penstock.text.prompt import NONCE_BYTES, ChatPrompts
from penstock.text.reasoning import ReasoningMarks
from penstock.text.tokenizer import GenerationDefaults, Tokenizer
from penstock.text.tool_formats import HERMES, ToolFormat
from penstock.types import BLOCK_TOKENS, ModelName, without_version

if TYPE_CHECKING:
    from penstock.gateway.models.auto_model import AutoModels

_TASKS = {"": "generate", "scores": "score"}
"""The task of a model, by how it pools."""
_BEGINNING_BYTES = 4096
"""Of a conversation that has no name: as many of its first messages tell it from others."""
_CHUNK = 256
"""Tokens compared at a time."""


class PublicPrefixes:
    """The declared prefixes of one model, as tokens."""

    __slots__ = ("_prefixes",)

    def __init__(self, prefixes: Iterable[tuple[int, ...]]) -> None:
        self._prefixes = tuple(dict.fromkeys(prefixes))

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate) -> "PublicPrefixes":
        """Tokenize each text as the start of a plain prompt and as the system prompt of a chat.

        Raises:
            ConfigError: a text has less than one block of tokens, so nothing could be shared.
        """
        found: list[tuple[int, ...]] = []
        prompts = ChatPrompts(template, tokenizer, nonce=fresh_key(NONCE_BYTES)) if texts else None
        for i, text in enumerate(texts):
            assert prompts is not None
            forms = list(_forms(text, tokenizer, prompts))
            if (longest := max(map(len, forms))) < BLOCK_TOKENS:
                raise ConfigError(
                    f"models[].public_prefixes[{i}]: has {longest} tokens with its chat template; "
                    f"blocks of {BLOCK_TOKENS} are shared, so it would share nothing"
                )
            found += forms
        return cls(found)

    def num_tokens_of(self, prompt: Sequence[int]) -> int:
        """How many leading tokens of `prompt` are public."""
        if not self._prefixes:
            return 0
        return max(_num_common(prefix, prompt) for prefix in self._prefixes)


NO_PUBLIC_PREFIXES = PublicPrefixes(())


def _forms(text: str, tokenizer: Tokenizer, prompts: ChatPrompts) -> Iterator[tuple[int, ...]]:
    """The ways in which a prompt may begin with `text`."""
    yield tokenizer.encode(text)
    yield tokenizer.encode(text, add_special_tokens=True)
    if not prompts.template.exists:
        return
    system = {"role": "system", "content": text}
    try:
        # Two chats that differ in the first character of the question: what they have in common comes before
        # it.
        one, other = (
            prompts.token_ids([system, {"role": "user", "content": content}]) for content in ("A", "7")
        )
    except InvalidRequest:
        return  # This template takes no system prompt.
    yield one[: _num_common(one, other)]


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common prefix."""
    length = min(len(left), len(right))
    start = 0
    while start < length and tuple(left[start : start + _CHUNK]) == tuple(right[start : start + _CHUNK]):
        start += _CHUNK
    while start < length and left[start] == right[start]:
        start += 1
    return min(start, length)


_OPENAI = GenerationDefaults(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def filled(defaults: GenerationDefaults) -> GenerationDefaults:
    """A model's defaults, with OpenAI's where they say nothing."""
    said = {name: value for name, value in msgspec.structs.asdict(defaults).items() if value is not None}
    return msgspec.structs.replace(_OPENAI, **said)


@dataclass(slots=True, frozen=True, kw_only=True)
class ServedModel:
    """One model: who computes it, and how its text becomes tokens."""

    name: ModelName
    workers: RouteWorkers
    tokenizer: Tokenizer
    template: ChatTemplate
    created_s: int
    """When it was loaded, in seconds since the epoch."""
    tool_format: ToolFormat = HERMES
    """How it calls tools."""
    reasoning: ReasoningMarks | None = None
    """The marks around its reasoning; None: it does not reason."""
    declared_len: int = 0
    """Tokens of its context as the configuration or the checkpoint says, until a worker has said it; 0:
    neither does."""
    public_prefixes: PublicPrefixes = NO_PUBLIC_PREFIXES
    """The beginnings of prompts that are no tenant's secret."""
    prompts: ChatPrompts = field(init=False)
    """Makes the token ids of chats."""

    defaults: GenerationDefaults = field(init=False)
    """Of requests that leave sampling open: its own, then OpenAI's; none is None."""
    has_special_marks: bool = field(init=False)
    """Whether the marks around its reasoning are special tokens, which texts leave out."""

    def __post_init__(self) -> None:
        ids = (self.tokenizer.token_id(mark) for mark in self.reasoning or ())
        is_special = any(token_id in self.tokenizer.special_ids for token_id in ids)
        object.__setattr__(self, "has_special_marks", is_special)
        object.__setattr__(self, "defaults", filled(self.tokenizer.defaults))
        prompts = ChatPrompts(self.template, self.tokenizer, nonce=fresh_key(NONCE_BYTES))
        object.__setattr__(self, "prompts", prompts)  # It is frozen for everybody else.

    def info(self) -> ModelInfo:
        """Facts that hold for any of its workers.

        Raises:
            WorkerUnavailable: none has been ready yet.
        """
        info = self.workers.info
        if info is None:  # Once one was ready, requests wait in the queue.
            stage = self.workers.summary().public_stage
            raise WorkerUnavailable(f"The model '{self.name}' is not ready: {stage}.")
        return info

    def card(self) -> ModelCard:
        """Its entry in `/v1/models`."""
        info = self.workers.info
        return ModelCard(
            id=self.name,
            created=self.created_s,
            max_model_len=info.max_model_len if info is not None else self.declared_len or None,
            task=None if info is None else _TASKS.get(info.pooling, "embed"),
            state=self.workers.summary().phase.value if self.workers.sleeps else None,
        )

    def adapter_card(self, name: str) -> ModelCard:
        """The entry of one of its adapters."""
        return msgspec.structs.replace(self.card(), id=name, parent=self.name)

    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes when the same seed may give another answer."""
        info = self.workers.info
        return _fingerprint(
            f"{self.name}/{info.architecture}/{info.dtype}/{info.num_parameters}" if info else self.name
        )


@lru_cache(maxsize=1024)
def _fingerprint(what: str) -> str:
    return "fp_" + hashlib.blake2b(what.encode(), digest_size=5).hexdigest()


class Resolved(NamedTuple):
    """The model that a request asks for."""

    model: ServedModel
    adapter: str = ""
    """Of the model; empty: the model itself."""
    choice: ComplexityChoice | None = None
    """How it was chosen, if the request asks for "auto"."""
    assigned: Assigned | None = None
    """The version that a rollout has assigned to its conversation."""


class ModelTable:
    """Finds a model by name, or by what a request needs."""

    def __init__(
        self,
        models: Mapping[ModelName, ServedModel],
        routing: RoutingConfig = RoutingConfig(),  # noqa: B008 - it is frozen.
        ensembles: Sequence[EnsembleConfig] = (),
    ) -> None:
        self._models = dict(models)
        self._first: dict[str, ServedModel] = {}
        """Of models with versions, by the name without one: the version that stands first."""
        for name, model in self._models.items():
            if (plain := without_version(name)) != name:
                self._first.setdefault(plain, model)
        self.rollouts = RolloutTable()
        created_s = max((model.created_s for model in models.values()), default=0)
        self._auto = _choose_auto(routing, created_s) if routing.auto else None
        self._ensembles = {each.name: each.model for each in ensembles}
        self._plain = {
            str(name): Resolved(model)
            for name, model in self._models.items()
            if not (
                name in self._first or name in self._ensembles or (self._auto and name == self._auto.name)
            )
        }
        """Models whose names mean them and nothing else."""

    def __iter__(self):  # noqa: ANN204
        return iter(self._models.values())

    def takes(self, name: str) -> bool:
        """Whether a model, one without its version, or "auto" has this name, so that no adapter can."""
        is_auto = self._auto is not None and name == self._auto.name
        return is_auto or name in self._models or name in self._first or name in self._ensembles

    def cards(self, tenant: Tenant) -> list[ModelCard]:
        """The entries of `/v1/models` for a tenant: their adapters and "auto" after the models themselves."""
        mine = [model for model in self if may_use_model(tenant, model.name)]
        found = [model.card() for model in mine]
        found += [_alias(name, model) for name in self._first if (model := self._serving(name)) in mine]
        for model in mine:
            names = (name for name in sorted(model.workers.adapters) if not self.takes(name))
            found += [model.adapter_card(name) for name in names if may_use_adapter(tenant, name)]
        if self._auto is not None and self._auto.may_use(tenant):
            found.append(self._auto.card())
        found += [self._ensemble_card(name) for name in self._ensembles if may_use_model(tenant, name)]
        limits = _limits_of(tenant)
        return [msgspec.structs.replace(card, limits=limits) for card in found]

    def card(self, name: str, tenant: Tenant) -> ModelCard:
        """One entry of `/v1/models`.

        Raises:
            NotFound: there is no such model.
            Forbidden: it is not the tenant's.
        """
        return msgspec.structs.replace(self._card(name, tenant), limits=_limits_of(tenant))

    def _ensemble_card(self, name: str) -> ModelCard:
        """The entry of an ensemble: its model's, under its own name."""
        base = self._ensembles[name]
        if self._auto is not None and base == self._auto.name:
            return msgspec.structs.replace(self._auto.card(), id=name, root=base)
        model = self._of_adapter(base) or self._models.get(ModelName(base)) or self._serving(base)
        card = (
            ModelCard(id=name, created=0) if model is None else model.card()
        )  # An adapter that is not there yet.
        return msgspec.structs.replace(card, id=name, root=base)

    def _card(self, name: str, tenant: Tenant) -> ModelCard:
        if name in self._ensembles:
            check_model(tenant, name)
            return self._ensemble_card(name)
        if self._auto is not None and name == self._auto.name and self._auto.may_use(tenant):
            return self._auto.card()
        if (model := self._of_adapter(name)) is not None:
            check_model(tenant, model.name)
            check_adapter(tenant, name)
            return model.adapter_card(name)
        model = self.get(name, tenant)
        check_model(tenant, model.name)
        return _alias(name, model) if name in self._first else model.card()

    def resolve(
        self,
        request: GenerationRequest,
        tenant: Tenant,
        needs: frozenset[str] = frozenset(),
        session: str = "",
    ) -> "Resolved":
        """Find the model that a request asks for: a model, an adapter of one, or "auto": one that can do what
        is needed, if there is one. Of a model in a rollout, the version that the conversation gets.

        Raises:
            NotFound: there is no such model.
            Forbidden: it is not the tenant's.
        """
        if (plain := self._plain.get(request.model)) is not None:
            if tenant.models:  # Else it may use all of them.
                check_model(tenant, plain.model.name)
            return plain
        if self._auto is not None and request.model == self._auto.name:
            choice = self._auto.choose(request, tenant, lambda name: self._max_length(name, needs))
            model = self.get(choice.model, tenant)
            check_model(tenant, model.name)
            return Resolved(model, choice=choice)
        if (model := self._of_adapter(request.model)) is not None:
            assert request.model
            check_model(tenant, model.name)
            check_adapter(tenant, request.model)
            return Resolved(model, adapter=request.model)
        if (found := self._assigned(request, tenant, session)) is not None:
            return found
        model = self.get(request.model, tenant)
        if tenant.models:  # Else it may use all of them.
            check_model(tenant, model.name)
        return Resolved(model)

    def _assigned(self, request: GenerationRequest, tenant: Tenant, session: str) -> "Resolved | None":
        if request.model not in self._first:
            return None
        assigned = self.rollouts.assign(
            request.model, lambda: conversation_of(request, tenant, session), tenant
        )
        if assigned is None or (model := self._models.get(ModelName(assigned.version))) is None:
            return None
        # A version that has no worker, or is not the tenant's, is no canary.
        can_answer = model.workers.is_ready or model.workers.is_expected
        return (
            Resolved(model, assigned=assigned) if can_answer and may_use_model(tenant, model.name) else None
        )

    def get(self, name: str | None, tenant: Tenant = ANONYMOUS) -> ServedModel:
        """The model of this name; without a name the only one, where there is only one.

        Raises:
            NotFound: there is no such model.
        """
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        model = self._models.get(ModelName(name or "")) or self._serving(name or "")
        if name in self._ensembles:
            raise Unsupported(
                f"'{name}' is an ensemble, which answers /v1/chat/completions and /v1/completions only.",
                param="model",
            )
        if model is None:
            allowed = [known for known in self._models if may_use_model(tenant, known)]
            known = ", ".join(f"'{known}'" for known in allowed[:8]) or "none for you"
            why = "No model is named" if name is None else f"The model '{name[:64]}' does not exist"
            raise NotFound(f"{why}. This server has {known}.", param="model", code="model_not_found")
        return model

    def _serving(self, name: str) -> ServedModel | None:
        """The version that a name without one means, outside of a rollout's canary."""
        return self._models.get(ModelName(self.rollouts.first(name))) or self._first.get(name)

    def _of_adapter(self, name: str | None) -> ServedModel | None:
        """The model that has an adapter of this name; models' own names go before."""
        if not name or self.takes(name):
            return None
        return next((model for model in self if name in model.workers.adapters), None)

    def _max_length(self, name: str, needs: frozenset[str]) -> int | None:
        model = self._models.get(ModelName(name))
        if model is None or not model.workers.is_ready or (needs and model.workers.lacking(needs)):
            return None
        info = model.workers.info
        return info.max_model_len if info is not None else 0


def conversation_of(request: GenerationRequest, tenant: Tenant, session: str) -> str:
    """Names the conversation of a request: by what the client says, else by how it begins, which every turn
    repeats.
    """
    if not session:
        said: object = getattr(request, "prompt", "")
        if isinstance(request, ChatRequest):
            first = next((i for i, each in enumerate(request.messages) if each.role == "user"), 0)
            said = request.messages[: first + 1]
        session = msgspec.json.encode(said)[:_BEGINNING_BYTES].decode(errors="replace")
    return f"{tenant.id}\0{session}"


def _alias(name: str, model: ServedModel) -> ModelCard:
    """The entry of a name without a version."""
    return msgspec.structs.replace(model.card(), id=name, root=model.name)


def _limits_of(tenant: Tenant) -> CallerLimits:
    """Of 0, which is no limit, comes null."""
    return CallerLimits(
        tier=tenant.tier or None,
        requests_per_minute=tenant.requests_per_minute or None,
        tokens_per_minute=tenant.tokens_per_minute or None,
        concurrent_requests=tenant.concurrent_max or None,
        output_tokens=tenant.output_tokens_max or None,
        context_tokens=tenant.context_tokens_max or None,
    )


def _choose_auto(routing: RoutingConfig, created_s: int) -> "AutoModels":
    """The chooser for `model: "auto"`."""
    from penstock.gateway.models import auto_model  # Absent unless configured.

    return auto_model.AutoModels(routing, created_s=created_s)


def model_facts(models: Mapping[ModelName, ServedModel], name: str) -> ModelFacts | None:
    """The facts that admission decides on; None if no model of this name is served."""
    model = models.get(ModelName(name))
    if model is None:
        return None
    info = model.workers.info
    return ModelFacts(
        max_model_len=info.max_model_len if info is not None else 0,
        adapters=model.workers.adapters,
        capabilities=model.workers.capabilities,
        kinds=model.workers.kinds,
    )
