"""What a launched engine is told that its own section of the configuration leaves open."""

import pytest

from penstock.config.engine_settings import with_quota
from penstock.config.tenancy import AuthConfig, JwtConfig, TenantConfig
from penstock.config.tree import Config, EngineConfig

TWO = (TenantConfig(id="acme"), TenantConfig(id="zoo"))


@pytest.mark.parametrize(
    ("config", "quota"),
    [
        (Config(), 1.0),
        (Config(auth=AuthConfig(keys=("a",))), 1.0),
        (Config(tenants=TWO[:1]), 1.0),
        (Config(tenants=TWO), 0.5),
        (Config(auth=AuthConfig(keys=("a", "b"))), 0.5),
        (Config(tenants=TWO[:1], auth=AuthConfig(keys=("a",))), 0.5),
        (Config(auth=AuthConfig(keys_file="keys.jsonl")), 0.5),
        (Config(auth=AuthConfig(jwt=JwtConfig(issuer="https://id.example"))), 0.5),
    ],
)
def test_several_tenants_each_have_half_of_the_kv_cache(config: Config, quota: float) -> None:
    assert with_quota(EngineConfig(), config).kv_quota_fraction == quota
    assert with_quota(EngineConfig(kv_quota_fraction=0.25), config).kv_quota_fraction == 0.25
    assert with_quota(EngineConfig(kv_quota_fraction=1.0), config).kv_quota_fraction == 1.0
