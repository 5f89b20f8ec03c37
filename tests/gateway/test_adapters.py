"""Adapters that workers tell of: clients name them as models, and their requests go only where they are
served.
"""

import asyncio

import httpx2
import pytest
from openai import NotFoundError, PermissionDeniedError

from penstock.backends.base import Adapters, Phase
from penstock.clock import SystemClock
from penstock.config.tenancy import TenantConfig
from penstock.config.tree import Config
from penstock.gateway.identity.tenants import TenantTable
from penstock.policy.placement.pick import Decision
from penstock.types import RequestId


@pytest.fixture
def running(start, kit):
    running = start(kit.replace(kit.make_config(), auth={"keys": (kit.KEY,), "admin_keys": (kit.KEY,)}))
    tell(running, "tone", "brief")
    return running


def tell(running, *names: str, loaded: tuple[str, ...] = (), phase: Phase = Phase.READY) -> None:
    """Let the worker say which adapters it has."""

    def say() -> None:
        running.backend.status.adapters = Adapters(frozenset(names), frozenset(loaded))
        running.backend.status.phase = phase
        running.backend.on_change()

    running.call(say)


def decided(running, answer_id: str) -> list[Decision | None]:
    """Which workers the request was placed at, and why."""
    finding = running.gateway._services.kept.find(RequestId(answer_id))
    return [entry.decision for entry in asyncio.run_coroutine_threadsafe(finding, running.loop).result(10)]


def test_a_request_names_an_adapter_as_its_model(running, kit) -> None:
    with kit.openai_client(running) as talk:
        answer = talk.chat.completions.create(model="tone", messages=kit.chat()["messages"], max_tokens=2)
        cards = {card.id: getattr(card, "parent", None) for card in talk.models.list()}
        assert talk.models.retrieve("brief").id == "brief"
    assert answer.model == "tone"
    assert running.requests[0].adapter == "tone"
    assert cards == {"tiny": None, "brief": "tiny", "tone": "tiny"}
    (decision,) = decided(running, answer.id)
    assert decision.request.needs_adapter


def test_an_adapter_of_nobody_is_no_model_and_one_whose_worker_is_lost_is_waited_for(running, kit) -> None:
    with kit.openai_client(running) as talk:
        with pytest.raises(NotFoundError, match="'nonsuch' does not exist"):
            talk.completions.create(model="nonsuch", prompt="x")
        tell(running, phase=Phase.LOST)
        assert "tone" in [card.id for card in talk.models.list()], "its worker may be back in a moment"
        tell(running, phase=Phase.READY)
        with pytest.raises(NotFoundError):
            talk.completions.create(model="tone", prompt="x")


def test_placements_know_what_is_served_and_what_is_loaded_and_the_fleet_shows_it(running, kit) -> None:
    tell(running, "tone", "brief", loaded=("tone",))
    with kit.openai_client(running) as talk:
        for name, is_loaded in (("tone", True), ("brief", False)):
            answer = talk.completions.create(model=name, prompt="x", max_tokens=1)
            (decision,) = decided(running, answer.id)
            assert [not each.adapter_s for each in decision.candidates] == [is_loaded]
    shown = kit.Raw(running)
    shown.send(kit.get("/admin/workers", f"Authorization: Bearer {kit.KEY}"))
    assert b'"adapters":["brief","tone"],"adapters_loaded":["tone"]' in shown.read_until(b'"models"')
    shown.close()


def test_a_tenant_uses_the_adapters_of_its_allowlist_and_sees_no_others(start, kit) -> None:
    plain = kit.make_config()
    me = TenantTable(plain, clock=SystemClock()).of_key(kit.KEY.encode()).tenant.id
    running = start(
        Config(server=plain.server, auth=plain.auth, tenants=(TenantConfig(id=me, adapters=("tone",)),))
    )
    tell(running, "tone", "brief")
    with kit.openai_client(running) as talk:
        for model in ("tone", "tiny"):
            assert talk.completions.create(model=model, prompt="x", max_tokens=1).model == model
        for ask in (
            lambda: talk.completions.create(model="brief", prompt="x"),
            lambda: talk.models.retrieve("brief"),
        ):
            with pytest.raises(PermissionDeniedError) as refused:
                ask()
            assert (refused.value.code, refused.value.param) == ("adapter_not_allowed", "model")
            assert "'brief'" in str(refused.value)
        assert [card.id for card in talk.models.list()] == ["tiny", "tone"]
    assert [request.adapter for request in running.requests] == ["tone", ""]
    with kit.openai_client(running, "sk-other-key-0123456789") as anyone:
        assert anyone.completions.create(model="brief", prompt="x", max_tokens=1).model == "brief"


def test_an_adapter_for_nobody_knows_which_of_several_models_is_refused_by_the_fields_name(
    start, kit
) -> None:
    running = start(
        kit.replace(kit.make_config(), auth={"admin_keys": ("admin-0123456789abcdef",)}), small=True
    )
    said = httpx2.post(
        f"{running.url}/v1/load_lora_adapter",
        json={"lora_name": "tone", "lora_path": "/srv/tone"},
        headers={"authorization": "Bearer admin-0123456789abcdef"},
        timeout=20,
    )
    assert said.status_code == 400
    error = said.json()["error"]
    assert error["param"] == "base_model_name"
    assert "one of tiny, small" in error["message"]
