import pytest
from msgspec.structs import replace

from penstock.config.checks import check
from penstock.config.flow import LimitsConfig
from penstock.config.machine import is_loopback
from penstock.config.routing import AutoModel, RoutingConfig
from penstock.config.tree import (
    AuthConfig,
    Config,
    EngineConfig,
    KVEventsConfig,
    ModelConfig,
    ServerConfig,
    SharedConfig,
    TracesConfig,
)
from penstock.errors import ConfigError

KEYS = AuthConfig(keys=("k" * 16,))
ANYWHERE = "tcp://*:5557"


def kv_events(*, prefix_cache: bool = True, **settings) -> Config:
    engine = EngineConfig(prefix_cache=prefix_cache, kv_events=KVEventsConfig(**settings))
    return Config(models=(ModelConfig(path="a", engine=engine),))


def test_the_defaults_are_fine() -> None:
    check(Config())
    check(Config(server=ServerConfig(host="0.0.0.0"), auth=KEYS))
    check(Config(auth=AuthConfig(disabled=True)))
    check(
        Config(
            server=ServerConfig(
                cors_origins=("https://a.example", "http://[::1]:3000", "capacitor://localhost")
            )
        )
    )
    check(Config(server=ServerConfig(cors_origins=("*",))))
    check(kv_events(endpoint=ANYWHERE, replay_endpoint="ipc:///tmp/replay"))
    check(kv_events(endpoint="tcp://router.example:5557", connect=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Config(models=(ModelConfig(path="a", engine=EngineConfig(max_model_len=1)),)),
            r"models\[0\]\.engine\.max_model_len: 1 leaves no room for a prompt and an answer; at least 2",
        ),
        (
            Config(server=ServerConfig(cors_origins=("https://a.example/",))),
            (
                r"server\.cors_origins\[0\]: expected '\*' or SCHEME://HOST\[:PORT\] in lower case, without "
                r"a path"
            ),
        ),
        (
            Config(traces=TracesConfig(endpoint="localhost:4317")),
            r"traces\.endpoint: expected http\(s\)://HOST\[:PORT\]/v1/traces",
        ),
        (
            Config(server=ServerConfig(cors_origins=("https://a.example", "*"))),
            r"server\.cors_origins\[1\]: '\*' is all origins, so it stands alone",
        ),
        (
            Config(shared=SharedConfig(url="parent:/tmp/x")),
            r"shared\.url: expected redis://",
        ),
        (
            Config(server=ServerConfig(host="0.0.0.0")),
            r"auth\.keys: needed because server\.host '0\.0\.0\.0'",
        ),
        (Config(server=ServerConfig(host="::"), auth=AuthConfig(disabled=True)), r"auth\.disabled: refused"),
        (
            Config(auth=AuthConfig(keys=("k" * 16, "two words that are long"))),
            r"auth\.keys\[1\]: expected 16 to 512 visible",
        ),
        (
            Config(auth=AuthConfig(scrape_keys=("k" * 15,))),
            r"auth\.scrape_keys\[0\]: a key of 15 characters is too short",
        ),
        (
            Config(server=ServerConfig(hosts=("ok.example", "https://a.example"))),
            r"server\.hosts\[1\]: expected the name",
        ),
        (Config(auth=AuthConfig(keys=("",))), r"auth\.keys\[0\]"),
        (Config(models=()), "models: at least one"),
        (Config(models=(ModelConfig(path=""),)), r"models\[0\]\.path: empty"),
        (Config(models=(ModelConfig(path="a", name="a b"),)), r"models\[0\]\.name: expected 1 to 256"),
        (
            Config(models=(ModelConfig(path="x/demo"), ModelConfig(path="y", name="demo"))),
            r"models\[1\]\.name: 'demo' is the name of models\[0\] already",
        ),
        (
            Config(models=(ModelConfig(path="a", engine=EngineConfig(step_tokens=16)),)),
            r"models\[0\]\.engine\.step_tokens: 16 is below max_running \(64\)",
        ),
        (kv_events(replay_endpoint=ANYWHERE), r"models\[0\]\.engine\.kv_events\.replay_endpoint: of no use"),
        (kv_events(endpoint="localhost"), r"models\[0\]\.engine\.kv_events\.endpoint: expected tcp://"),
        (kv_events(endpoint="tcp://*:0"), r"kv_events\.endpoint: expected a port from 1 to 65535, got 0"),
        (
            kv_events(endpoint=ANYWHERE, replay_endpoint="tcp://:1"),
            r"kv_events\.replay_endpoint: expected tcp://ADDRESS:PORT or ipc://PATH, got 'tcp://:1'",
        ),
        (
            kv_events(endpoint=ANYWHERE, replay_endpoint=ANYWHERE),
            r"kv_events\.replay_endpoint: tcp://\*:5557 is taken by models\[0\]\.engine\.kv_events\.endpoint",
        ),
        (
            kv_events(endpoint=ANYWHERE, connect=True),
            r"kv_events\.endpoint: with connect it needs the address",
        ),
        (kv_events(prefix_cache=False, endpoint=ANYWHERE), r"kv_events\.endpoint: of no use without prefix_"),
        (Config(limits=LimitsConfig(n_max=9, concurrent_max=8)), r"limits\.n_max: above"),
    ],
)
def test_contradictions(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check(Config(models=(), auth=AuthConfig(keys=("",))))
    assert len(str(caught.value).splitlines()) == 2


def test_messages_do_not_show_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        check(Config(auth=AuthConfig(keys=("my secret",))))
    assert "my secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("", False), ("localhost.evil.org", False),
    ],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def adapted(adapters: dict[str, str], slots: int = 20) -> Config:
    engine = EngineConfig(adapter_slots=slots)
    return Config(models=(ModelConfig(path="a", adapters=adapters, engine=engine), ModelConfig(path="b")))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (adapted({"b": "/x"}), r"models\[0\]\.adapters\.b: a model has this name"),
        (
            replace(adapted({"auto": "/x"}), routing=RoutingConfig(auto=(AutoModel(model="b"),))),
            r"adapters\.auto: the choice between models has this name",
        ),
        (adapted({"x y": "/x"}), r"models\[0\]\.adapters: expected names without white space"),
        (adapted({"x": "ftp://h/x"}), r"adapters\.x: expected a directory, http://, https:// or s3://"),
        (adapted({"x": ""}), r"adapters\.x: empty"),
        (adapted({"x": "/x"}, slots=0), r"models\[0\]\.engine\.adapter_slots: 0, so no adapter could"),
    ],
)
def test_adapters_that_are_refused(config: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(config)


def test_adapters_with_names_of_their_own_are_taken() -> None:
    check(adapted({"x": "/x", "y": "s3://b/y#digest=00"}))
