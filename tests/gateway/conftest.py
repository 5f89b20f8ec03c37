"""A gateway on a free port, in a thread of its own, in front of a scripted backend."""

import asyncio
import contextlib
import io
import socket
import tempfile
import threading
import types
from collections.abc import Callable, Iterator

import msgspec
import openai
import pytest
import tokenizers
import uvloop
from engine_stand_ins import OpenAIStandIn, until
from fake_backend import FakeBackend, Script, endless_words
from fleets import fleet_of
from redis_process import RedisProcess
from test_external_conformance import tools

from penstock.backends.http.backend import ExternalWorker
from penstock.backends.http.external import make_backend
from penstock.backends.http.terms import HttpBackendLimits
from penstock.clock import Clock, SystemClock
from penstock.config.flow import LimitsConfig
from penstock.config.tree import AuthConfig, Config, LogConfig, ServerConfig
from penstock.fleet.members import Members
from penstock.gateway.app import Gateway
from penstock.gateway.dispatch.assemble import GatewayTools
from penstock.gateway.http.terms import WireLimits
from penstock.gateway.models.served import PublicPrefixes, ServedModel
from penstock.policy.terms import queue_terms
from penstock.rng import IdSource
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.text.chat import ChatTemplate
from penstock.text.reasoning import reasoning_marks
from penstock.text.tokenizer import GenerationDefaults, Tokenizer, decoding_of
from penstock.text.tool_formats import tool_format
from penstock.types import ModelName

PATIENCE_S = 30.0
"""For what takes milliseconds, however busy the machine is."""
KEY = "sk-test-key-0123456789"
OTHER_KEY = "sk-other-key-0123456789"
NO_PROMISES = {"ttft_target_ms": 0, "tpot_target_ms": 0, "targets": ()}
"""For tests of what waits: nothing is refused because it would be late."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(words: tuple[str, ...] = ()) -> Tokenizer:
    """Every byte is a token, so counts are easy to check; and so is each of `words`.

    Those that begin with "<|" are special.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<|end|>"])
    library.add_special_tokens([word for word in words if word.startswith("<|")])
    library.add_tokens([word for word in words if not word.startswith("<|")])
    return Tokenizer(
        library,
        decoding=decoding_of({"type": "ByteLevel"}),
        eos_ids=(256,),
        defaults=GenerationDefaults(temperature=0.7, top_k=20),
    )


class RunningGateway:
    """A gateway in a thread, and handles to look inside it."""

    def __init__(
        self,
        config: Config,
        script: Script = endless_words,
        *,
        step_s: float = 0.0,
        public: tuple[str, ...] = (),
        max_running: int = 1024,
        small: bool = False,
        template: str = TEMPLATE,
        words: tuple[str, ...] = (),
        clock: Clock | None = None,
        names: tuple[str, ...] = (),
        **limits: float,
    ) -> None:
        """`limits` are fields of `WireLimits`. `words`: of the script, which must have ids of their own.

        `small`: there is a second model, "small", with a worker of its own; or `names` are the models.
        """
        self.clock = clock or SystemClock()
        self._directory = tempfile.TemporaryDirectory()
        if not config.ledger.directory:  # What other gateways' tenants have spent is nothing to it.
            config = replace(config, ledger={"directory": f"{self._directory.name}/ledger"})
        self.config, self._limits = config, WireLimits(**limits)
        self.log_text = io.StringIO()
        self.requests = []
        self._script, self._step_s, self._public = script, step_s, public
        self._template, self._words = template, words
        self._max_running, self._names = max_running, names or (("tiny", "small") if small else ("tiny",))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    def _main(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.tokenizer = tokenizer = tiny_tokenizer(self._words)
        self.backends = await self.make_backends()
        self.backend = self.backends[self._names[0]]
        self.metrics = Metrics(list(self._names), version="test")
        template = ChatTemplate({"default": self._template}, special_tokens={}, wall_ns=self.clock.wall_ns)
        log = Log(self.config.log, self.clock, stream=self.log_text)
        self.registry = fleet_of(self.clock, self.backends, places=self.config.cells.places)
        self.members = Members(self.registry, log, drain_timeout_s=5.0)
        models = [
            ServedModel(
                name=ModelName(name),
                workers=self.registry.of(name),
                tokenizer=tokenizer,
                template=template,
                created_s=1_700_000_000,
                tool_format=tool_format([self._template]),
                reasoning=reasoning_marks([self._template]),
                public_prefixes=PublicPrefixes.of(self._public, tokenizer, template),
            )
            for name in self._names
        ]
        self.gateway = Gateway(
            self.config,
            {model.name: model for model in models},
            self.registry,
            GatewayTools(metrics=self.metrics, clock=self.clock, ids=IdSource(seed=1), log=log),
            self.members,
            limits=self._limits,
        )
        self.host, self.port = await self.gateway.start()
        self._ready.set()
        await self._stop.wait()
        await self.gateway.stop(lameduck_s=self._lameduck_s, listens=self._listens)
        await self.close_backends()

    async def make_backends(self):
        return {
            name: FakeBackend(
                self.clock,
                script=self._recorded,
                step_s=self._step_s,
                max_running=self._max_running,
                token_id=self.tokenizer.token_id if self._words else lambda _token: None,
            )
            for name in self._names
        }

    async def close_backends(self) -> None:
        """Of those that need it."""

    def _recorded(self, request):
        self.requests.append(request)
        return self._script(request)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def call(self, work: Callable[[], object]) -> object:
        """Run `work` on the gateway's loop and return what it returns."""

        async def on_loop() -> object:
            return work()

        return asyncio.run_coroutine_threadsafe(on_loop(), self.loop).result(PATIENCE_S)

    def wait_until(self, check: Callable[[], bool]) -> None:
        """Block until `check` holds on the gateway's loop."""

        async def poll() -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not check():
                    await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(poll(), self.loop).result(2 * PATIENCE_S)

    _lameduck_s, _listens = 0.0, True

    def begin_stop(self, lameduck_s: float = 0.0, *, listens: bool = True) -> None:
        self._lameduck_s, self._listens = lameduck_s, listens
        self.loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.begin_stop(self._lameduck_s, listens=self._listens)
            self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._directory.cleanup()


class BeforeProvider(RunningGateway):
    """A gateway whose only worker is a provider, in the same event loop."""

    async def make_backends(self):
        self.provider = OpenAIStandIn()
        await self.provider.start()
        worker = ExternalWorker(engine="openai", url=self.provider.url, model="served")
        backend = make_backend(worker, self.tokenizer, tools(HttpBackendLimits(probe_s=0.05)))
        backend.open()
        await until(lambda: backend.status.ready)
        return {"tiny": backend}

    async def close_backends(self) -> None:
        await self.backend.close()
        await self.provider.kill()


def make_config(**server: object) -> Config:
    return Config(
        server=ServerConfig(port=0, **{"drain_timeout_s": 0.5, "trust_local": True, **server}),
        auth=AuthConfig(keys=(KEY, OTHER_KEY)),
        limits=LimitsConfig(concurrent_max=16),
        log=LogConfig(),
    )


def replace(config: Config, **branches: object) -> Config:
    """The config with some branches' fields changed: `replace(config, server={"flush_ms": 1})`."""
    for name, fields in branches.items():
        branch = queue_terms(config.queue) if name == "queue" else getattr(config, name)
        config = msgspec.structs.replace(config, **{name: msgspec.structs.replace(branch, **fields)})
    return config


class Raw:
    """A plain socket to a gateway, for what no HTTP library would send."""

    def __init__(self, running: RunningGateway) -> None:
        self.socket = socket.create_connection((running.host, running.port), timeout=PATIENCE_S)

    def send(self, data: bytes) -> "Raw":
        self.socket.sendall(data)
        return self

    def read_until(self, mark: bytes) -> bytes:
        got = b""
        while mark not in got:
            piece = self.socket.recv(65536)
            assert piece, got
            got += piece
        return got

    def read_all(self) -> bytes:
        """Everything until the server closes its side."""
        pieces = []
        while piece := self.socket.recv(65536):
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        self.socket.close()


def post(path: str, body: object, *headers: str, key: str = KEY) -> bytes:
    """The bytes of a POST; a body that is not bytes becomes JSON."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    lines = [
        f"POST {path} HTTP/1.1", "Host: test", f"Authorization: Bearer {key}",
        f"Content-Length: {len(data)}", *headers, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + data


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()


def chat(**fields: object) -> dict[str, object]:
    """A chat request, changed by `fields`."""
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    if not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def kit() -> types.SimpleNamespace:
    """What test modules share; they cannot import one another."""
    return types.SimpleNamespace(
        KEY=KEY, Raw=Raw, chat=chat, get=get, post=post, make_config=make_config, replace=replace,
        openai_client=openai_client, TEMPLATE=TEMPLATE, RunningGateway=RunningGateway,
        NO_PROMISES=NO_PROMISES, BeforeProvider=BeforeProvider,
    )  # fmt: skip


@pytest.fixture
def raw(gateway: RunningGateway) -> Iterator[Raw]:
    made = Raw(gateway)
    yield made
    made.close()


@pytest.fixture(scope="session")
def gateway() -> Iterator[RunningGateway]:
    """One gateway for the tests that need nothing special."""
    running = RunningGateway(make_config())
    yield running
    running.stop()


@pytest.fixture
def start() -> Iterator[Callable[..., RunningGateway]]:
    """Make gateways with settings of their own."""
    with contextlib.ExitStack() as stack:

        def make(config: Config | None = None, script: Script = endless_words, **options) -> RunningGateway:
            running = RunningGateway(config or make_config(), script, **options)
            stack.callback(running.stop)
            return running

        yield make


def openai_client(running: RunningGateway, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=20)


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai_client(gateway) as made:
        yield made
