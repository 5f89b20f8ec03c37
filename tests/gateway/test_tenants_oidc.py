"""A real OpenID Connect provider (oidc-provider from npm): its tokens, and its keys changing under them."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("jwt", reason="PyJWT is not installed (penstock[jwt])")

from tenant_keys import ask

from penstock.gateway.identity.tokens import JwtTerms

PACKAGE = "oidc-provider@9.13.3"
PROVIDER = Path(__file__).parents[1] / "doubles" / "oidc_provider.mjs"
AUDIENCE = "urn:penstock"

pytestmark = pytest.mark.timeout(240)


class RealProvider:
    """The provider's process, and what a client does with it."""

    def __init__(self, place: Path) -> None:
        command = ["node", str(place / PROVIDER.name)]
        self._process = subprocess.Popen(
            command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the provider did not start"
        self.issuer = f"http://127.0.0.1:{int(line)}"

    def token(self, client: str) -> str:
        """An access token by the client credentials grant (RFC 6749, section 4.4) for our resource (RFC
        8707).
        """
        fields = {"grant_type": "client_credentials", "resource": AUDIENCE, "scope": "generate"}
        login = b64encode(f"{client}:a+secret+of+the+test".encode()).decode()
        return json.loads(self._post("/token", fields, Authorization=f"Basic {login}"))["access_token"]

    def rotate(self, query: str = "") -> None:
        self._post(f"/test/rotate?{query}", {})

    def _post(self, path: str, fields: dict[str, str], **headers: str) -> bytes:
        data = urllib.parse.urlencode(fields).encode()
        request = urllib.request.Request(self.issuer + path, data, headers)
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the provider's package in it."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    place = tmp_path_factory.mktemp("oidc")
    # Without one of its own, npm would install into the nearest directory above that has one.
    (place / "package.json").write_text('{"private": true}')
    install = ["npm", "install", "--no-fund", "--no-audit", "--ignore-scripts", "--prefer-offline", PACKAGE]
    try:
        done = subprocess.run(install, cwd=place, capture_output=True, text=True, check=False, timeout=90)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not answer: no registry?")
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr.strip()[-300:]}")
    shutil.copy(PROVIDER, place)
    return place


@pytest.fixture(scope="module")
def provider(installed: Path) -> Iterator[RealProvider]:
    """Tokens of every test are new, and so are the keys that a gateway has seen."""
    made = RealProvider(installed)
    yield made
    made.close()


def gateway_for(provider: RealProvider, start, kit, **options):
    jwt = JwtTerms(
        issuer=provider.issuer,
        audience=(AUDIENCE,),
        tier_claim="plan.tier",
        refresh_s_min=0.1,
        timeout_s=20.0,
    )
    return start(kit.replace(kit.make_config(), auth={"jwt": jwt}), **options)


def test_a_real_providers_tokens(provider, start, kit) -> None:
    running = gateway_for(provider, start, kit)
    for client in ("acme", "umbrella"):
        assert ask(running, provider.token(client))[0] == 200
    acme, umbrella = running.requests
    assert (acme.fairness_key, umbrella.fairness_key) == ("acme", "umbrella")
    assert acme.cache_salt != umbrella.cache_salt
    # The free tier's limit is umbrella's and not acme's.
    long = [{"role": "user", "content": "hi"}]
    status, body = ask(running, provider.token("umbrella"), messages=long, max_tokens=5000)
    assert status == 400
    assert "your tier 'free' is 4096 tokens (output_tokens_max)" in body["error"]["message"]
    assert ask(running, provider.token("acme"), max_tokens=5000)[0] == 200
    assert ask(running, provider.token("acme")[:-4] + "AAAA")[0] == 401


def test_a_real_providers_keys_rotate(provider, start, kit) -> None:
    running = gateway_for(provider, start, kit)
    first = provider.token("acme")
    assert ask(running, first)[0] == 200
    for algorithm in ("ES256", "RS256"):
        provider.rotate(f"alg={algorithm}")
        # At once, long before the next regular fetch: tokens of the new key and of the old ones.
        assert ask(running, provider.token("acme"))[0] == 200
        assert ask(running, first)[0] == 200
    provider.rotate("drop")
    assert ask(running, provider.token("umbrella"))[0] == 200
    status, body = ask(running, first)
    assert (status, body["error"]["code"]) == (401, "invalid_token")


def test_a_real_provider_goes_away(installed, start, kit) -> None:
    provider = RealProvider(installed)
    running = gateway_for(provider, start, kit)
    tokens = [provider.token("acme") for _ in range(2)]
    assert ask(running, tokens[0])[0] == 200
    provider.close()
    assert [ask(running, token)[0] for token in tokens] == [200, 200]
