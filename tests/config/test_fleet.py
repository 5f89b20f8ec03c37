"""Workers that are configured wrongly: refused by the name of the key."""

import pytest

from penstock.config.checks import check
from penstock.config.load import parse_config
from penstock.errors import ConfigError

PROBLEMS = {
    "{path: a, workers: [{url: 'http://h:1', engine: vlm}]}": "models[0].workers[0].engine: expected one of",
    "{path: a, workers: [{url: 'http://h:1'}]}": "models[0].workers[0].engine: missing",
    "{path: a, replicas: 0}": "models[0].replicas: 0, and there are no workers",
    "{path: a, replicas: -1}": "models[0].replicas: ",
    "{path: a, workers: [{url: 'h:1', engine: vllm}]}": "models[0].workers[0].url: expected http://HOST:PORT",
    "{path: a, workers: [{url: 'http://h:0', engine: vllm}]}": "models[0].workers[0].url: expected a port",
    "{path: a, workers: [{url: 'http://h:1', engine: penstock}]}": "engine penstock listens at unix:/PATH",
    "{path: a, workers: [{url: 'tcp:h:99999', engine: penstock}]}": "expected a port from 1 to 65535, got "
    "99999",
    "{path: a, workers: [{url: 'http://h:1', engine: vllm, api_key_env: 'sk-1'}]}": "workers[0].api_key_env",
    "{path: a, workers: [{url: 'http://h:1', engine: vllm, kv_replay: 'tcp://h:2'}]}": "kv_replay: of no use",
    "{path: a, workers: [{url: 'http://h:1', engine: vllm}, {url: 'http://h:1/', engine: vllm}]}": (
        "models[0].workers[1].url: http://h:1/ is models[0].workers[0] already"
    ),
    "{path: a}, {path: b/a}": "models[1].name: 'a' is the name of models[0] already",
    "{path: a, replicas: 2, engine: {kv_events: {endpoint: 'tcp://*:5557'}}}": "2 replicas cannot share one "
    "address",
}


@pytest.mark.parametrize("models", PROBLEMS)
def test_what_is_wrong_is_named(models: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(parse_config(f"models: [{models}]\nauth: {{disabled: true}}"))
    assert PROBLEMS[models] in str(error.value)


def test_the_number_of_workers_is_bounded() -> None:
    models = ", ".join(f"{{path: {name}, replicas: 256}}" for name in "abcde")
    with pytest.raises(ConfigError, match="models: 1280 workers are configured, which is over the bound of"):
        check(parse_config(f"models: [{models}]\nauth: {{disabled: true}}"))


def test_one_server_may_have_several_models() -> None:
    worker = "{url: 'http://h:1', engine: openai, served_model: %s}"
    models = f"{{path: a, replicas: 0, workers: [{worker % 'x'}]}}, {{path: b, workers: [{worker % 'y'}]}}"
    check(parse_config(f"models: [{models}]\nauth: {{disabled: true}}"))
