"""Models of several versions: their names, and what cannot be meant."""

import pytest

from penstock.config.checkpoints import plain_name, served_name
from penstock.config.checks import check
from penstock.config.tree import Config, ModelConfig
from penstock.errors import ConfigError
from penstock.policy.tenant import Tenant, may_use_model
from penstock.types import TenantId, without_version


def config(*models: ModelConfig) -> Config:
    return Config(models=models)


def model(name: str, version: int = 0) -> ModelConfig:
    return ModelConfig(path="penstock-demo", name=name, version=version)


def test_names() -> None:
    assert [served_name(model("a", version)) for version in (0, 1, 12)] == ["a", "a@1", "a@12"]
    assert plain_name(model("a", 3)) == "a"
    assert served_name(ModelConfig(path="penstock-demo", version=2)) == "penstock-demo@2"
    names = {"a@2": "a", "a@b@2": "a@b", "a": "a", "a@x": "a@x", "a@0": "a@0", "@1": "@1"}
    assert {name: without_version(name) for name in names} == names


def test_what_goes_together() -> None:
    check(config(model("a", 2), model("a", 1), model("b")))
    for wrong, why in (
        ((model("a", 1), model("a", 1)), "'a@1' is the name of models\\[0\\] already"),
        ((model("a"), model("a", 1)), "models\\[0\\] has the name without a version"),
        ((model("a", 1), model("a")), "'a' means a version of models\\[0\\] already"),
        ((model("a@3"),), "ends like a version"),
    ):
        with pytest.raises(ConfigError, match=why):
            check(config(*wrong))


def test_an_allowlist_names_a_version_or_all() -> None:
    one = Tenant(id=TenantId("t"), models=frozenset({"a@1", "b"}))
    allowed = {name: may_use_model(one, name) for name in ("a@1", "a@2", "b", "b@7", "c")}
    assert allowed == {"a@1": True, "a@2": False, "b": True, "b@7": True, "c": False}
