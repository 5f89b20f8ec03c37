"""Tokens with keys made here: every way to be wrong, and what is believed of the right ones."""

import http.client
import io
import json
import time
import urllib.error
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_S, ManualClock
from penstock.config.tenancy import DEFAULT_TIERS, TenantConfig
from penstock.errors import Forbidden, Unauthenticated

jwt = pytest.importorskip("jwt", reason="PyJWT is not installed (penstock[jwt])")

from identity_provider import AUDIENCE, IdentityProvider, Key, raw_token
from tenant_keys import ask

from penstock.gateway.identity.tenants import Tenants
from penstock.gateway.identity.tokens import JwtTerms, TokenVerifier, fetch_url, parse_jwks

ISSUER = "https://id.example"
RSA, OTHER, CURVE, EDWARDS = Key("rsa"), Key("other"), Key("ec", "ES256"), Key("ed", "EdDSA")
NOW_S = 1_700_000_000


class Known:
    """Keys as a provider's last answer said."""

    def __init__(self, *keys: Key) -> None:
        self.keys = (
            parse_jwks(json.dumps({"keys": [key.jwk for key in keys]}).encode(), keys_max=64) if keys else {}
        )


def make(*keys: Key, tenants=(), **settings_) -> tuple[TokenVerifier, ManualClock]:
    config = JwtTerms(
        **{"issuer": ISSUER, "audience": (AUDIENCE, "second"), "tier_claim": "tier", **settings_}
    )
    clock = ManualClock(wall_ns=NOW_S * NS_PER_S)
    made = Tenants(tenants, DEFAULT_TIERS, secret=b"s")
    return TokenVerifier(config, Known(*(keys or (RSA, CURVE, EDWARDS))), made, clock=clock), clock


def claims(**changed) -> dict:
    all_ = {"iss": ISSUER, "aud": AUDIENCE, "sub": "acme", "iat": NOW_S, "exp": NOW_S + 600, **changed}
    return {name: value for name, value in all_.items() if value is not None}


@pytest.mark.parametrize("key", [RSA, CURVE, EDWARDS], ids=lambda key: key.algorithm)
def test_a_good_token(key) -> None:
    tokens, _ = make()
    caller = tokens.find(key.sign(claims(tier="pro")).encode())
    assert caller is not None
    assert (caller.tenant.id, caller.tenant.tier, caller.key_prefix) == ("acme", "pro", "acme")


def hmac_with_the_public_key() -> str:
    """The classic: the public key, which everybody has, as the secret of an HMAC."""
    import hashlib
    import hmac

    unsigned = raw_token({"alg": "HS256", "typ": "JWT", "kid": "rsa"}, claims()).rpartition(".")[0]
    signature = hmac.new(RSA.public_pem, unsigned.encode(), hashlib.sha256).digest()
    return f"{unsigned}.{raw_token('', '', signature).rpartition('.')[2]}"


BAD = {
    "no algorithm": (lambda: raw_token({"alg": "none", "kid": "rsa"}, claims()), "algorithm is not accepted"),
    "no algorithm, spelt otherwise": (lambda: raw_token({"alg": "nOnE", "kid": "rsa"}, claims()),
        ("algorithm is "
    "not accepted")),
    "algorithm missing": (lambda: raw_token({"kid": "rsa"}, claims()), "not accepted"),
    "algorithm a list": (lambda: raw_token({"alg": ["RS256"], "kid": "rsa"}, claims()), "not accepted"),
    "hmac with the public key": (hmac_with_the_public_key, "algorithm is not accepted"),
    "an algorithm that is not its key's": (lambda: RSA.sign(claims(), algorithm="PS256"), "is not its key's"),
    "another kind of key": (lambda: RSA.sign(claims(), kid="ec"), "not its key's"),
    "another key's name": (lambda: OTHER.sign(claims(), kid="rsa"), "signature is wrong"),
    "no signature": (lambda: RSA.sign(claims()).rpartition(".")[0] + ".", "signature is wrong"),
    "changed claims": (lambda: ".".join([*(a := RSA.sign(claims()).split("."))[:1],
        raw_token(0, claims(sub="boss")).split(".")[1], a[2]]), ("signature is "
    "wrong")),
    "no key named": (lambda: OTHER.sign(claims(), kid=None), "signature is wrong"),
    "a key name that is no text": (lambda: raw_token({"alg": "RS256", "kid": 7}, claims()), "not accepted"),
    "critical fields": (lambda: RSA.sign(claims(), crit=["b64"], b64=False), "critical|cannot be read"),
    "expired": (lambda: RSA.sign(claims(exp=NOW_S - 31)), "expired"),
    "not yet": (lambda: RSA.sign(claims(nbf=NOW_S + 31)), "not valid yet"),
    "issued in the future": (lambda: RSA.sign(claims(iat=NOW_S + 31)), "not valid yet"),
    "valid for too long": (lambda: RSA.sign(claims(exp=NOW_S + 10**6)), "valid for too long"),
    "no end": (lambda: RSA.sign(claims(exp=None)), "'exp' is missing"),
    "no issuer": (lambda: RSA.sign(claims(iss=None)), "'iss' is missing"),
    "no audience": (lambda: RSA.sign(claims(aud=None)), "aud"),
    "another issuer": (lambda: RSA.sign(claims(iss=ISSUER + "/")), "another issuer"),
    "another audience": (lambda: RSA.sign(claims(aud="billing")), "another service"),
    "an end that is text": (lambda: RSA.sign(claims(exp="soon")), "no time"),
    "an end that is true": (lambda: RSA.sign(claims(exp=True)), "no time"),
    "an end beyond numbers": (lambda: RSA.sign(claims(exp=10**400)), "no time"),
    "an end that is infinite": (lambda: RSA.sign(claims(exp=float("inf"))), "no time"),
    "claims that are a list": (lambda: raw_token({"alg": "RS256", "kid": "rsa"}, [1]), "signature is wrong"),
    "a header that is a list": (lambda: raw_token([1], claims()), "cannot be read"),
    "a deep header": (lambda: raw_token(b"[" * 9000, claims()), "cannot be read"),
    "no JSON": (lambda: raw_token(b"{", claims()), "cannot be read"),
    "no base64": (lambda: "eyJ\x80..", "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_token(name) -> None:
    tokens, _ = make(RSA) if "named" in name else make()
    token, words = BAD[name]
    with pytest.raises(Unauthenticated, match=words) as refused:
        tokens.find(token().encode("latin-1"))
    assert refused.value.code in ("invalid_token", "expired_token", "early_token")
    assert tokens.num_remembered == 0


def test_a_token_of_an_unknown_key_is_not_judged_yet() -> None:
    tokens, _ = make()
    assert tokens.find(OTHER.sign(claims()).encode()) is None
    tokens.find(RSA.sign(claims(), kid="rsa").encode())
    nobody = make()[0]
    nobody._keys = Known()
    assert nobody.find(RSA.sign(claims(), kid=None).encode()) is None


def test_only_the_provider_says_the_key() -> None:
    """A key in the token's own header would be the forger's."""
    tokens, _ = make(RSA)
    forged = OTHER.sign(
        claims(), kid="rsa", jwk=OTHER.jwk, jku="https://evil.example/jwks", x5u="https://evil.example"
    )
    with pytest.raises(Unauthenticated, match="signature is wrong"):
        tokens.find(forged.encode())


def test_times_with_leeway_and_memory() -> None:
    tokens, clock = make()
    token = RSA.sign(claims(exp=NOW_S + 60)).encode()
    first = tokens.find(token)
    assert tokens.num_remembered == 1
    assert tokens.find(token) is first
    clock.advance(89 * NS_PER_S)
    assert tokens.find(token) is first
    clock.advance(NS_PER_S)
    for _ in range(2):
        with pytest.raises(Unauthenticated, match="expired"):
            tokens.find(token)
    assert tokens.num_remembered == 0


def test_the_memory_is_bounded_and_forgets() -> None:
    tokens, _ = make(tokens_max=3)
    signed = [RSA.sign(claims(jti=str(i))).encode() for i in range(5)]
    for token in signed:
        assert tokens.find(token) is not None
        assert tokens.num_remembered <= 3
    tokens.forget()
    assert tokens.num_remembered == 0
    # Without the key a remembered token would still have passed; a forgotten one does not.
    tokens._keys = Known(OTHER)
    assert tokens.find(signed[-1]) is None


@pytest.mark.parametrize(
    ("path", "given", "tenant"),
    [
        ("sub", {"sub": "auth0|12ab"}, "auth0|12ab"),
        ("app.org.id", {"app": {"org": {"id": "deep"}}}, "deep"),
        ("https://x.example/tenant", {"https://x.example/tenant": "url"}, "url"),
        ("app.org.id", {"app": {"org": "flat"}}, None),
        ("app.org", {"app": ["org"]}, None),
        ("org", {"org": 7}, None),
        ("org", {"org": ""}, None),
        ("org", {"org": "two words"}, None),
        ("org", {"org": "key-1234abcd"}, None),
        ("org", {"org": "x" * 129}, None),
        ("org", {}, None),
    ],
)
def test_which_claim_is_the_tenant(path, given, tenant) -> None:
    tokens, _ = make(tenant_claim=path)
    token = RSA.sign(claims(**given)).encode()
    if tenant is None:
        with pytest.raises(Forbidden, match="names no tenant") as refused:
            tokens.find(token)
        assert refused.value.code == "no_tenant"
    else:
        caller = tokens.find(token)
        assert caller is not None
        assert caller.tenant.id == tenant


def test_which_tier_a_token_gives() -> None:
    def tier(tokens: TokenVerifier, **changed) -> str:
        caller = tokens.find(RSA.sign(claims(**changed)).encode())
        assert caller is not None
        return caller.tenant.tier

    listed = [TenantConfig(id="acme", tier="enterprise")]
    assert tier(make()[0]) == "free"
    assert tier(make()[0], tier="pro") == "pro"
    # The configuration says what this tenant has; a token cannot say more.
    assert tier(make(tenants=listed)[0], tier="pro") == "enterprise"
    for settings_, changed in (({}, {"tier": "golden"}), ({"default_tier": ""}, {})):
        with pytest.raises(Forbidden, match="names no tier"):
            tier(make(**settings_)[0], **changed)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80) | st.text(max_size=40).map(lambda text: raw_token(text, {}).encode()))
def test_no_bytes_do_harm(data) -> None:
    tokens, _ = make()
    try:
        assert tokens.find(b"eyJ" + data) is None
    except Unauthenticated:
        assert tokens.num_remembered == 0


def test_which_keys_of_a_provider_are_taken() -> None:
    unusable = [
        Key("short", bits=1024).jwk,
        {**OTHER.jwk, "use": "enc", "kid": "enc"},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "oct"},
        {"kty": "RSA", "kid": "half"},
        {"kty": "XX"},
        "text",
        json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(OTHER.private)) | {"kid": "private"},
    ]
    keys = parse_jwks(json.dumps({"keys": [*unusable, RSA.jwk, EDWARDS.jwk]}).encode(), keys_max=64)
    assert set(keys) == {"rsa", "ed"}
    assert len(parse_jwks(json.dumps({"keys": [RSA.jwk, EDWARDS.jwk]}).encode(), keys_max=1)) == 1
    for wrong in (
        b"",
        b"[]",
        b"{}",
        b'{"keys": 7}',
        b'{"keys": []}',
        json.dumps({"keys": unusable}).encode(),
    ):
        with pytest.raises((ValueError, TypeError)):
            parse_jwks(wrong, keys_max=64)


# --- through sockets, with a provider that serves its keys ---------------------------------------


@pytest.fixture
def provider():
    made = IdentityProvider(Key("one"))
    yield made
    made.close()


def with_provider(kit, provider, **settings_):
    config = {"issuer": provider.issuer, "audience": (AUDIENCE,), "refresh_s_min": 0.1, **settings_}
    return kit.replace(kit.make_config(), auth={"jwt": JwtTerms(**config)})


def test_tokens_through_a_socket(start, kit, provider) -> None:
    running = start(with_provider(kit, provider, tier_claim="tier"))
    assert ask(running, provider.token(tier="pro"))[0] == 200
    assert running.requests[-1].fairness_key == "acme"
    status, body = ask(running, provider.token(exp=int(time.time()) - 60))
    assert (status, body["error"]["code"]) == (401, "expired_token")
    assert ask(running, provider.token(sub="two words"))[0] == 403
    assert ask(running, kit.KEY)[0] == 200
    assert provider.token()[:40] not in running.log_text.getvalue()


def test_keys_that_rotate_with_tokens_in_flight(start, kit, provider) -> None:
    running = start(with_provider(kit, provider))
    old = provider.token(jti="a")
    assert ask(running, old)[0] == 200
    provider.keys.append(Key("two"))
    # A token of the new key comes before the next regular look at the keys: it waits for one.
    assert ask(running, provider.token(provider.keys[1]))[0] == 200
    assert ask(running, old)[0] == 200
    assert ask(running, provider.token(jti="b"))[0] == 200
    # The old key is withdrawn: its tokens end at the next look, remembered ones too.
    first = provider.keys.pop(0)
    provider.keys.append(Key("three"))
    assert ask(running, provider.token(provider.keys[1]))[0] == 200
    for token in (old, provider.token(first)):
        status, body = ask(running, token)
        assert (status, body["error"]["code"]) == (401, "invalid_token")


def test_a_key_that_nobody_has(start, kit, provider) -> None:
    running = start(with_provider(kit, provider))
    assert ask(running, provider.token())[0] == 200
    status, body = ask(running, provider.token(Key("stranger")))
    assert (status, body["error"]["code"]) == (401, "invalid_token")
    assert "not one of the issuer's" in body["error"]["message"]


def test_unknown_keys_cannot_make_us_hammer_the_provider(start, kit, provider) -> None:
    running = start(with_provider(kit, provider, refresh_s_min=60.0, timeout_s=0.5))
    assert ask(running, provider.token())[0] == 200
    fetches = provider.fetches
    stranger = Key("stranger")
    for _ in range(5):
        status, body = ask(running, provider.token(stranger))
        assert (status, body["error"]["code"]) == (503, "identity_unavailable")
    assert provider.fetches == fetches
    assert ask(running, provider.token())[0] == 200


@pytest.mark.parametrize(
    "answer",
    [
        (500, b"{}"),
        (200, b"not json"),
        (200, b'{"keys": []}'),
        (200, b'{"keys": 7}'),
        (200, b"[]"),
        (0, b"SSH-2.0-x\r\n"),
        (200, b"x" * 300_000),
        (302, b""),
    ],
)
def test_a_provider_that_is_down(start, kit, provider, answer) -> None:
    provider.answer = answer
    running = start(with_provider(kit, provider, refresh_s=0.2, timeout_s=1.0))
    status, body = ask(running, provider.token())
    assert (status, body["error"]["code"]) == (503, "identity_unavailable")
    assert ask(running, kit.KEY)[0] == 200
    provider.answer = None
    running.wait_until(lambda: "provider's keys are here" in running.log_text.getvalue())
    assert ask(running, provider.token())[0] == 200
    # Once there are keys they stay while it is away: tokens go on, new keys have to wait.
    provider.answer = answer
    seen = running.log_text.getvalue().count("cannot be fetched")
    running.wait_until(lambda: running.log_text.getvalue().count("cannot be fetched") > seen)
    assert ask(running, provider.token(jti="new"))[0] == 200


def test_stale_keys_are_dropped_in_the_end(start, kit, provider) -> None:
    running = start(with_provider(kit, provider, refresh_s=0.2, timeout_s=0.5, stale_s_max=0.2))
    assert ask(running, provider.token())[0] == 200
    provider.answer = (500, b"")
    running.wait_until(lambda: "its keys are dropped" in running.log_text.getvalue())
    assert ask(running, provider.token())[0] == 503


def test_a_provider_that_calls_itself_something_else(start, kit, provider) -> None:
    running = start(
        with_provider(kit, provider, issuer=provider.issuer.replace("127.0.0.1", "localhost"), timeout_s=1.0)
    )
    assert ask(running, provider.token())[0] == 503
    assert "the provider calls itself" in running.log_text.getvalue()


def test_a_refused_fetch_lets_its_connection_go(monkeypatch: pytest.MonkeyPatch) -> None:
    body = io.BytesIO(b"no")

    class Refuses:
        def open(self, request: Any, timeout: float) -> Any:
            raise urllib.error.HTTPError(request.full_url, 500, "no", http.client.HTTPMessage(), body)

    monkeypatch.setattr("urllib.request.build_opener", lambda *_: Refuses())
    with pytest.raises(urllib.error.HTTPError):
        fetch_url("http://127.0.0.1:9/keys", 1.0, 100, ManualClock())
    assert body.closed
