"""Tenants through a real socket: whose request it is, what it may use, and what nobody can forge."""

import json
import urllib.error
import urllib.request

import pytest

from penstock.clock import SystemClock
from penstock.config.tenancy import TenantConfig, TierConfig
from penstock.config.tree import Config
from penstock.gateway.identity.tenants import Tenants, TenantTable

CHAT = "/v1/chat/completions"


def send(running, path, body=None, *, key, headers=()):
    """Status, headers and JSON of one request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        running.url + path,
        data,
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **dict(headers)},
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, dict(response.headers), json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), json.load(error)


def test_a_tenant_is_its_tier_with_its_own_settings_over_it() -> None:
    tier = TierConfig(name="gold", requests_per_minute=5, models=("a",), weight=2.0, budget_per_day=1.5)
    tenants = Tenants(
        [TenantConfig(id="acme", tier="gold", requests_per_minute=0, models=("b",)), TenantConfig(id="bare")],
        [tier],
        secret=b"s",
    )
    acme = tenants.tenant("acme")
    assert (acme.tier, acme.requests_per_minute, acme.models) == ("gold", 0, frozenset({"b"}))
    assert (acme.weight, acme.budget_day_micros, acme.fairness_key) == (2.0, 1_500_000, "acme")
    bare = tenants.tenant("bare")
    assert (bare.tier, bare.requests_per_minute, bare.models) == ("", 0, frozenset())
    other = tenants.tenant("other", "gold")
    assert (other.requests_per_minute, other.models) == (5, frozenset({"a"}))
    # What the configuration says of a tenant counts, whatever a key or a token says of its tier.
    assert tenants.tenant("bare", "gold").requests_per_minute == 0


def test_the_cache_salt_is_of_the_tenant_and_the_secret() -> None:
    def salt(tenant: str, secret: bytes) -> bytes:
        return Tenants([], [], secret=secret).tenant(tenant).cache_salt

    assert salt("a", b"1") == salt("a", b"1")
    assert len({salt("a", b"1"), salt("b", b"1"), salt("a", b"2"), salt("a", b"1" * 100)}) == 4
    assert len(salt("a", b"1")) == 16
    # A tenant's settings may change, and its cache is still its own.
    changed = Tenants([TenantConfig(id="a", weight=9.0)], [], secret=b"1")
    assert changed.tenant("a").cache_salt == salt("a", b"1")


def test_salts_do_not_show_in_logs() -> None:
    tenant = Tenants([], [], secret=b"1").tenant("a")
    assert tenant.cache_salt.hex() not in repr(tenant)
    assert "cache_salt" not in repr(tenant)


def test_every_plain_key_is_a_tenant_of_its_own(start, kit) -> None:
    running = start(kit.make_config())
    for key in (kit.KEY, kit.KEY, "sk-other-key-0123456789"):
        assert send(running, CHAT, kit.chat(max_tokens=1), key=key)[0] == 200
    first, again, other = running.requests
    assert first.cache_salt == again.cache_salt != other.cache_salt
    assert first.fairness_key == again.fairness_key != other.fairness_key
    assert first.fairness_key.startswith("key-")
    assert len(first.fairness_key) == len("key-") + 8


def test_forged_headers_and_fields_have_no_effect(start, kit) -> None:
    running = start(kit.make_config())
    assert send(running, CHAT, kit.chat(max_tokens=1), key=kit.KEY)[0] == 200
    forged = dict.fromkeys(
        ("x-tenant-id", "x-penstock-tenant", "cache-salt", "x-cache-salt", "x-api-key", "x-user-id"),
        "sk-other-key-0123456789",
    )
    assert (
        send(
            running, CHAT, kit.chat(max_tokens=1, user="sk-other-key-0123456789"), key=kit.KEY, headers=forged
        )[0]
        == 200
    )
    honest, liar = running.requests
    assert (honest.cache_salt, honest.fairness_key) == (liar.cache_salt, liar.fairness_key)
    status, _, body = send(running, CHAT, kit.chat(cache_salt="x"), key=kit.KEY)
    assert (status, body["error"]["code"], body["error"]["param"]) == (
        400,
        "unsupported_parameter",
        "cache_salt",
    )
    for field in ("tenant", "tenant_id", "fairness_key", "priority_band"):
        status, _, body = send(running, CHAT, kit.chat(**{field: "x"}), key=kit.KEY)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unknown_parameter", field)


def plain_tenant(config: Config, key: str) -> str:
    return TenantTable(config, clock=SystemClock()).of_key(key.encode()).tenant.id


def limited(kit, **limits) -> Config:
    """A config whose key `kit.KEY` belongs to a tenant with these limits."""
    config = kit.make_config()
    tenant = TenantConfig(id=plain_tenant(config, kit.KEY), tier="free", **limits)
    return Config(server=config.server, auth=config.auth, tenants=(tenant,))


def test_a_model_that_is_not_allowed(start, kit) -> None:
    running = start(limited(kit, models=("other",)))
    for path, body in ((CHAT, kit.chat()), ("/v1/completions", {"model": "tiny", "prompt": "a"}),
                       ("/v1/tokenize", {"model": "tiny", "prompt": "a"})):  # fmt: skip
        status, _, answer = send(running, path, body, key=kit.KEY)
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (
            403,
            "permission_error",
            "model_not_allowed",
        )
        assert "'tiny' is not allowed for your tier 'free'" in answer["error"]["message"]
    assert send(running, "/v1/models/tiny", key=kit.KEY)[0] == 403
    assert send(running, "/v1/models", key=kit.KEY)[2]["data"] == []
    status, _, answer = send(running, CHAT, kit.chat(model="tinny"), key=kit.KEY)
    assert (status, answer["error"]["message"]) == (
        404,
        "The model 'tinny' does not exist. This server has none for you.",
    )
    assert [
        model["id"] for model in send(running, "/v1/models", key="sk-other-key-0123456789")[2]["data"]
    ] == ["tiny"]
    assert send(running, CHAT, kit.chat(max_tokens=1), key="sk-other-key-0123456789")[0] == 200


@pytest.mark.parametrize(
    ("limits", "fields", "words"),
    [
        ({"context_tokens_max": 100}, {"messages": [{"role": "user", "content": "x" * 100}]}, ("tier 'free' "
        "is 100 tokens (context_tokens_max)")),
        ({"context_tokens_max": 100, "output_tokens_max": 0}, {"max_tokens": 90}, ("tier 'free' is 100 "
        "tokens (context_tokens_max)")),
        ({"output_tokens_max": 5}, {"max_tokens": 6}, ("answer length of your tier 'free' is 5 tokens "
        "(output_tokens_max)")),
    ],
)  # fmt: skip
def test_token_limits(start, kit, limits, fields, words) -> None:
    running = start(limited(kit, **{"output_tokens_max": 0, **limits}))
    status, _, body = send(running, CHAT, kit.chat(**fields), key=kit.KEY)
    assert status == 400
    assert words in body["error"]["message"]
    assert running.requests == []
    assert (
        send(running, CHAT, kit.chat(**{"max_tokens": 1, **fields}), key="sk-other-key-0123456789")[0] == 200
    )


def test_an_answer_of_no_asked_length_is_clipped_to_the_limits(start, kit) -> None:
    running = start(limited(kit, context_tokens_max=30, output_tokens_max=0))
    status, _, body = send(running, CHAT, kit.chat(), key=kit.KEY)
    assert (status, body["usage"]["total_tokens"], body["choices"][0]["finish_reason"]) == (200, 30, "length")
    running = start(limited(kit, output_tokens_max=3))
    assert send(running, CHAT, kit.chat(), key=kit.KEY)[2]["usage"]["completion_tokens"] == 3
    completion = {"model": "tiny", "prompt": "abc"}
    answer = send(running, "/v1/completions", completion, key=kit.KEY)[2]
    assert answer["usage"]["completion_tokens"] == 3
