"""The sections `tenants`, `tiers` and `auth`."""

import re
from pathlib import Path

import pytest

from penstock.config.checks import check
from penstock.config.load import convert_config, dump_config, parse_config, with_environment
from penstock.config.tree import Config
from penstock.errors import ConfigError

FULL = """
tiers:
  - {name: free, context_tokens_max: 32768, requests_per_minute: 10}
  - {name: gold, weight: 2.5, band: bulk, models: [a, b/c], budget_per_day: 5, budget_per_month: 100}
tenants:
  - {id: acme, tier: gold, context_tokens_max: 131072, degrade: never}
  - {id: "org:1/eu", models: []}
auth:
  keys_file: keys.jsonl
  jwt: {issuer: "https://id.example/", audience: [penstock], tenant_claim: app.org, tier_claim: tier}
"""


def test_a_full_config_is_fine_and_survives_a_dump() -> None:
    config = parse_config(FULL)
    check(config)
    assert parse_config(dump_config(config)) == config
    assert config.tenants[0].requests_per_minute is None
    assert config.tenants[1].models == ()


def test_the_default_tiers() -> None:
    tiers = {tier.name: tier for tier in Config().tiers}
    assert list(tiers) == ["free", "pro", "interactive", "enterprise"]
    assert tiers["free"].context_tokens_max == 32 * 1024
    assert tiers["enterprise"].context_tokens_max == 128 * 1024
    assert tiers["free"].weight < tiers["pro"].weight < tiers["enterprise"].weight


JWT = {"issuer": "https://id.example", "audience": ["penstock"]}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"tenants": [{"id": "a", "tier": "golden"}]}, (r"tenants\[0\]\.tier: there is no tier 'golden'; "
        r"there are free, pro")),
        ({"tenants": [{"id": "a"}, {"id": "a"}]}, r"tenants\[1\]\.id: 'a' is the id of tenants\[0\] already"),
        ({"tenants": [{"id": "two words"}]}, r"tenants\[0\]\.id: expected 1 to 128 letters"),
        ({"tenants": [{"id": ""}]}, r"tenants\[0\]\.id: expected"),
        ({"tenants": [{"id": "key-1234"}]}, r"tenants\[0\]\.id: 'key-1234' begins with 'key-'"),
        ({"tenants": [{"id": "a", "band": "fast"}]}, (r"tenants\[0\]\.band: there is no band 'fast' in "
        r"queue.bands; there are system, pri")),
        ({"tiers": [{"name": "a", "band": ""}]}, r"tiers\[0\]\.band: there is no band ''"),
        ({"tenants": [{"id": "a", "models": ["a b"]}]}, r"tenants\[0\]\.models\[0\]: expected"),
        ({"tenants": [{"id": "a", "weight": 0}]}, r"tenants\[0\]\.weight: expected a number > 0"),
        ({"tenants": [{"id": "a", "requests_per_minute": "many"}]}, (r"tenants\[0\]\.requests_per_minute: "
        r"expected an integer")),
        ({"tenants": [{"id": "a", "budget": 1}]}, r"unknown key `tenants\[0\]\.budget`; did you mean"),
        ({"tenants": [{"tier": "free"}]}, r"tenants\[0\]\.id: missing"),
        ({"tiers": [{"name": "a"}, {"name": "a"}]}, (r"tiers\[1\]\.name: 'a' is the name of tiers\[0\] "
        r"already")),
        ({"tiers": [{"name": ""}]}, r"tiers\[0\]\.name: expected 1 to 64"),
        ({"tiers": [{"name": "a", "context_tokens_max": 10, "output_tokens_max": 11}]},
        (r"tiers\[0\]\.output_tokens_max: "
        r"11 is above context_tokens_max \(10\)")),
        ({"tiers": [{"name": "a", "budget_per_day": 10, "budget_per_month": 9}]},
        (r"tiers\[0\]\.budget_per_day: "
        r"10 is above")),
        ({"tiers": [{"name": "a", "degrade": "maybe"}]}, (r"tiers\[0\]\.degrade: expected one of allow, "
        r"never, prefer")),
        ({"auth": {"secret": "short"}}, r"auth\.secret: expected at least 16"),
        ({"auth": {"jwt": {"audience": ["x"]}}}, r"auth\.jwt\.issuer: needed"),
        ({"auth": {"jwt": {**JWT, "audience": []}}}, r"auth\.jwt\.audience: needed"),
        ({"auth": {"jwt": {**JWT, "issuer": "http://id.example"}}}, r"auth\.jwt\.issuer: refused over http"),
        ({"auth": {"jwt": {**JWT, "jwks_url": "file:///etc/passwd"}}}, (r"auth\.jwt\.jwks_url: expected "
        r"https://")),
        ({"auth": {"jwt": {**JWT, "issuer": "https://u:p@id.example"}}}, (r"auth\.jwt\.issuer: expected "
        r"https://")),
        ({"auth": {"jwt": {**JWT, "tenant_claim": "a..b"}}}, r"auth\.jwt\.tenant_claim: expected the name"),
        ({"auth": {"jwt": {**JWT, "default_tier": "x"}}}, r"auth\.jwt\.default_tier: there is no tier 'x'"),
        ({"auth": {"jwt": {**JWT, "algorithms": ["HS256"]}}}, (r"auth\.jwt\.algorithms` is no longer a "
        r"setting")),
        ({"auth": {"jwt": {**JWT, "lifetime_s_max": -1}}}, (r"auth\.jwt\.lifetime_s_max: expected a number "
        r">= 0")),
    ],
)  # fmt: skip
def test_what_is_refused(raw, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check(convert_config(raw))


def test_the_examples_in_the_docs_are_fine() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tenants.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        check(parse_config(example))


def test_the_default_tiers_go_with_other_bands() -> None:
    check(convert_config({"queue": {"bands": [{"name": "all", "order": 0}]}}))


def test_the_environment_names_file_and_secret() -> None:
    environ = {"PENSTOCK_KEYS_FILE": " /etc/keys ", "PENSTOCK_AUTH_SECRET": "s" * 32, "PENSTOCK_API_KEY": ""}
    auth = with_environment(Config(), environ).auth
    assert (auth.keys_file, auth.secret, auth.keys) == ("/etc/keys", "s" * 32, ())
    assert with_environment(Config(), {"PENSTOCK_KEYS_FILE": ""}) == Config()


def test_plain_http_is_fine_on_this_machine() -> None:
    check(convert_config({"auth": {"jwt": {**JWT, "issuer": "http://127.0.0.1:8080"}}}))


@pytest.mark.parametrize("auth", [{"keys_file": "f"}, {"jwt": JWT}, {"keys": ["k" * 16]}])
def test_any_way_to_authenticate_opens_other_addresses(auth) -> None:
    check(convert_config({"server": {"host": "0.0.0.0"}, "auth": auth}))
