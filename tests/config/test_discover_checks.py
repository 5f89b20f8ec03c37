"""What is wrong with places where workers are looked for: every problem names its key."""

import re
from pathlib import Path

import pytest
import yaml

from penstock.config.checks import check
from penstock.config.fleet import FleetConfig
from penstock.config.load import convert_config, dump_config
from penstock.config.tree import Config
from penstock.errors import ConfigError

KUBERNETES = {"namespace": "default", "service": "vllm"}


def config_of(**discover: object):
    return convert_config(
        {
            "models": [{"path": "m", "replicas": 0, "discover": [{"engine": "vllm", **discover}]}],
            "auth": {"keys": ["k" * 16]},
        }
    )


@pytest.mark.parametrize(
    "discover",
    [
        {"dns": "vllm.default.svc:8000"},
        {"dns": "_http._tcp.vllm.default.svc", "kv_events": 5557, "kv_replay": 5558},
        {"kubernetes": KUBERNETES},
        {"kubernetes": {**KUBERNETES, "api_server": "http://127.0.0.1:8001", "account": ""}},
    ],
)
def test_these_are_fine_alone_and_survive_being_printed(discover) -> None:
    config = config_of(**discover)
    check(config)
    assert convert_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("discover", "problem"),
    [
        ({}, r"discover\[0\]: expected exactly one of dns and kubernetes"),
        ({"dns": "a:1", "kubernetes": KUBERNETES}, r"discover\[0\]: expected exactly one"),
        ({"dns": "a"}, r"discover\[0\]\.dns: expected name:port"),
        ({"dns": "a:70000"}, r"discover\[0\]\.dns"),
        ({"dns": "_x._sctp.a"}, r"discover\[0\]\.dns"),
        ({"kubernetes": {**KUBERNETES, "service": "a/b"}}, r"kubernetes\.service"),
        ({"kubernetes": {**KUBERNETES, "namespace": ""}}, r"kubernetes\.namespace"),
        ({"kubernetes": {**KUBERNETES, "api_server": "k8s"}}, r"kubernetes\.api_server: expected"),
        ({"kubernetes": {**KUBERNETES, "api_server": "http://k8s"}}, r"api_server: refused over http"),
        ({"dns": "a:1", "api_key_env": "a-b"}, r"discover\[0\]\.api_key_env"),
        ({"dns": "a:1", "kv_replay": 5}, r"kv_replay: of no use"),
        ({"dns": "a:1", "kv_events": "tcp://b:5"}, r"discover\[0\]\.kv_events: expected the port alone"),
    ],
)
def test_what_is_wrong_is_named(discover, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(config_of(**discover))


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine: expected one of openai, penstock, "):
        config_of(dns="a:1", engine="vlm")


def test_the_examples_of_the_docs_are_configurations() -> None:
    text = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text()
    examples = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)]
    configs = [example for example in examples if "models" in example]
    assert len(configs) >= 3
    for raw in configs:
        check(convert_config(raw | {"auth": {"keys": ["k" * 16]}}))


def test_a_bound_on_memory_is_of_this_machine() -> None:
    config = Config(fleet=FleetConfig(launcher="ray", memory_bytes=1 << 30))
    with pytest.raises(ConfigError, match=r"fleet\.memory_bytes: bounds this machine"):
        check(config)
    check(Config(fleet=FleetConfig(memory_bytes=1 << 30)))
