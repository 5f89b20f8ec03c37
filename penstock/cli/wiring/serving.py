"""The life of a `penstock serve` process: listen, load, tell, serve, drain, stop.

    start ─> loading ─> ready (banner) ─> first SIGTERM or Ctrl-C: lameduck, draining ─> stopped, exit 0
                │                                     └─ a second one: last words, exit 130
                └─ a model cannot be served: exit 1 or 2; SIGTERM or Ctrl-C: stop, exit 0

A model that goes down for good does not end the process: /ready answers 503, requests for it get an error
that says why, and other models keep serving.

The banner that `serve` prints when it is ready: everything that a first request needs.
"""

import asyncio
import contextlib
import os
import platform
import resource
import shlex
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from penstock import gc_tuning, rng
from penstock.cli import console
from penstock.cli.python_build import python_advice, python_build
from penstock.cli.wiring.handover import Handover, Takeover, begin_takeover
from penstock.cli.wiring.progress import loading_display
from penstock.cli.wiring.signals import StopSignals, done_before, on_signal
from penstock.cli.wiring.state import forget_key, load_key, save_key, with_secret
from penstock.cli.wiring.wire import Stack
from penstock.clock import NS_PER_S, Clock
from penstock.config.machine import is_loopback
from penstock.config.tenancy import names_callers
from penstock.config.tree import Config
from penstock.engine.native.presence import TORCH_COST, kernels_here
from penstock.errors import PenstockError
from penstock.fleet.launchers.process import Spares
from penstock.gateway.http.terms import WIRE_LIMITS
from penstock.telemetry.log import Log

QUESTION = "What is Penstock?"


@dataclass(slots=True, frozen=True, kw_only=True)
class BannerFacts:
    """The facts of the banner."""

    url: str
    """Base URL, with /v1."""
    models: tuple[str, ...]
    key: str
    """The key that was made at this start; empty if it was configured (then it is not shown) or none is
    needed."""
    needs_key: bool
    ready_s: float
    """From the command to now."""
    open_to: str | None = None
    """The address that it listens on, if that is not only this machine."""
    kernels: tuple[str, ...] = ()
    """Of the models, as `ModelInfo.kernels`."""
    advice: str = ""
    """The way to faster kernels, where torch's compute."""
    python: str = ""
    """The way to a faster Python, where this one is known to be slow."""


def show(console: Console, facts: BannerFacts) -> None:
    """Print the banner. Wrapping is off, so that every line can be copied."""

    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    line()
    line(f"Penstock is ready after {facts.ready_s:.1f} s.", "bold green")
    line()
    line(f"  API        {facts.url}")
    if facts.open_to:
        line(f"  open to    other machines (listens on {facts.open_to})")
    line(f"  models     {', '.join(facts.models)}")
    if facts.kernels:
        line(f"  kernels    {', '.join(facts.kernels)}")
    if facts.advice:
        line(f"             {facts.advice}")
    if facts.python:
        line(f"  Python     {platform.python_version()}, {facts.python}")
    line(f"  key        {_key_note(facts)}")
    line(f"  console    {facts.url.removesuffix('/v1')}/console")
    line()
    line(curl_line(facts))
    line()
    line(python_snippet(facts))
    line()
    line("Or talk to it: penstock chat        Ctrl-C drains and stops.", "dim")


def advice(kernels: Iterable[str]) -> str:
    """The cost of computing with torch on a processor, and what ends it if that is an installation."""
    if not any(each.startswith("torch") for each in kernels):
        return ""
    here = kernels_here()
    return f"torch is {TORCH_COST}" + ("" if here.isa else f"; for those: {here.remedy}")


def _key_note(facts: BannerFacts) -> str:
    if not facts.needs_key:
        return "none is needed"
    if facts.key:
        return f"{facts.key}  (made for this run; set PENSTOCK_API_KEY for one that stays)"
    return "as configured"


def curl_line(facts: BannerFacts) -> str:
    """A command that streams an answer; one line, quoted for a shell."""
    message = {"role": "user", "content": QUESTION}
    body = msgspec.json.encode({"model": facts.models[0], "stream": True, "messages": [message]}).decode()
    auth = f' -H "Authorization: Bearer {_shell_key(facts)}"' if facts.needs_key else ""
    content = " -H 'Content-Type: application/json'"
    return f"curl -N {facts.url}/chat/completions{auth}{content} -d {shlex.quote(body)}"


def _shell_key(facts: BannerFacts) -> str:
    return facts.key if facts.key else "$PENSTOCK_API_KEY"


def python_snippet(facts: BannerFacts) -> str:
    """The same with the openai package (`pip install openai`)."""
    if not facts.needs_key:
        key, imports = '"none"', ""
    elif facts.key:
        key, imports = f'"{facts.key}"', ""
    else:
        key, imports = 'os.environ["PENSTOCK_API_KEY"]', "import os\n"
    return f"""{imports}from openai import OpenAI
client = OpenAI(base_url="{facts.url}", api_key={key})
stream = client.chat.completions.create(
    model="{facts.models[0]}", stream=True, messages=[{{"role": "user", "content": "{QUESTION}"}}])
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)"""


# The address under which others find a server that listens on all of this machine's.

_EVERYWHERE = {
    "0.0.0.0": (socket.AF_INET, "198.51.100.1", "127.0.0.1"),
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}
"""For each: an address reserved for documentation (RFC 5737, RFC 3849), and loopback's."""


def reachable(host: str) -> str:
    """`host`, or the address that this machine would send from to the world, where it listens on all;
    loopback if there is none.
    """
    if host not in _EVERYWHERE:
        return host
    family, stranger, loopback = _EVERYWHERE[host]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((stranger, 9))  # Chooses a route; a datagram socket sends nothing here.
            return str(probe.getsockname()[0])
    except OSError:
        return loopback


EXIT_ABORTED = 130
LAST_WORDS_S = 3.0
"""After a second signal: last events, and what clients got."""


class Serving:
    """One `penstock serve`: `run` it once. cli/commands/serve.py comes before."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        started_ns: int,
        reread: Callable[[], Config],
        spares: Spares,
        *,
        takes_over: bool = False,
    ) -> None:
        """`reread` makes the configuration again from its source, for SIGHUP; `spares` are processes for
        workers. With `takes_over` it follows the server that runs on its port, if one does.

        Raises:
            OperatorError: the configuration or a model cannot be served.
        """
        self._spares = spares
        self._clock, self._started_ns, self._reread = clock, started_ns, reread
        self._reloading: asyncio.Task[None] | None = None
        self._reload_wanted = False
        self._new_key, self._owns_key, self._is_taken = "", False, False
        self._takes_over = takes_over
        self._host, self._hosts, self._port = "", tuple[str, ...](), 0
        if not names_callers(config.auth):
            # Settings made sure that this is a loopback address.
            kept = load_key(config.server.host, config.server.port) if takes_over else ""
            self._new_key = kept or f"sk-{rng.fresh_token()}"
        config = self._config = self._completed(config)
        self._log = Log(config.log, clock, secrets=config.auth.secrets)
        self._log.adopt("asyncio")
        self._stack = Stack(config, clock, self._log, spares)

    async def run(self, signals: StopSignals) -> int:
        """Serve until told to stop; the exit code. It may have been told already.

        Raises:
            OperatorError: the configuration or a model cannot be served.
            WorkerUnavailable: a worker does not come up.
        """
        self._check_open_files()
        signals.on_drain = lambda _: console.err().print("\nstopping", markup=False)
        with on_signal(signal.SIGHUP, self._begin_reload):
            try:
                loading = asyncio.create_task(self._load(), name="load")
                if not await done_before(signals.drain, loading):
                    return 0
                takeover = loading.result()
                await self._spares.close()
                gc_tuning.tune_server()  # Again, for what loading made: little is left to move.
                if takeover is not None:
                    await self._stack.take_over(takeover)
                    self._save_key()  # Until here the file is the running server's.
                    self._log.info("took over from the server that ran here")
                return await self._served(signals)
            finally:
                if self._owns_key:
                    self._forget_key()
                await self._stack.abort()  # After a drain there is nothing left to do.

    async def _load(self) -> Takeover | None:
        """Listen, and wait for the models. Returns the server that is to be followed, if there is one."""
        takeover = await begin_takeover(self._config.server) if self._takes_over else None
        self._host, self._port = await self._stack.start(takeover)
        self._hosts = tuple(str(each.getsockname()[0]) for each in self._stack.listeners)
        if takeover is None:
            self._save_key()
        gc_tuning.tune_server()  # While models load: all of it behind them would hold up the first request.
        with loading_display(console.err()) as display:
            await self._stack.wait_ready(display)
        return takeover

    def _save_key(self) -> None:
        """This server has its address now: the key in the files is its key, and no other's."""
        self._forget_key()
        if self._new_key:
            for host in self._hosts:
                save_key(host, self._port, self._new_key)
        self._owns_key = True

    def _forget_key(self) -> None:
        for host in self._hosts:
            forget_key(host, self._port)

    async def _served(self, signals: StopSignals) -> int:
        """Serve until asked to stop, or until another server has taken over."""

        def taken() -> None:
            self._is_taken, self._owns_key = True, False
            self._log.info("another server has taken over; this one drains")
            signals.drain.set()

        signals.on_drain = self._say_draining
        handover = Handover(self._stack.listeners, taken, self._log)
        handover.open()
        try:
            self._show_banner(self._host, self._port)
            await signals.drain.wait()
        finally:
            handover.close()
        return await self._drained(signals)

    async def _drained(self, signals: StopSignals) -> int:
        """Stop without a loss; a second signal shortens it to what must be said and written down."""
        lameduck_s = self._lameduck_s(signals.first)
        draining = asyncio.create_task(self._stack.drain(lameduck_s=lameduck_s, listens=not self._is_taken))
        aborting = asyncio.create_task(signals.abort.wait())
        await asyncio.wait([draining, aborting], return_when=asyncio.FIRST_COMPLETED)
        aborting.cancel()
        if draining.done():
            draining.result()
            return 0
        self._stack.hurry()
        await asyncio.wait([draining], timeout=LAST_WORDS_S)
        draining.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await draining
        return EXIT_ABORTED

    def _lameduck_s(self, first: signal.Signals | None) -> float:
        server = self._config.server
        is_at_a_desk = first is signal.SIGINT and is_loopback(server.host)
        return 0.0 if is_at_a_desk else server.lameduck_s

    def _completed(self, config: Config) -> Config:
        """The configuration with what is made on this machine where it says nothing: a key, the secret."""
        if self._new_key and not names_callers(config.auth):
            admin_keys = (*config.auth.admin_keys, self._new_key)  # The user who starts a server operates it.
            auth = msgspec.structs.replace(config.auth, keys=(self._new_key,), admin_keys=admin_keys)
            config = msgspec.structs.replace(config, auth=auth)
        return with_secret(config)

    def _begin_reload(self) -> None:
        self._reload_wanted = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self._reload(), name="reload")

    async def _reload(self) -> None:
        """SIGHUP: read the configuration again. Reading happens in a thread, so that streams continue."""
        while (
            self._reload_wanted
        ):  # One more signal while reading means that there is something newer to read.
            self._reload_wanted = False
            self._log.info("reading the configuration again")
            try:
                config = await asyncio.to_thread(lambda: self._completed(self._reread()))
            except PenstockError as error:
                self._log.error("the new configuration was not taken; the old one stays", error=error)
            else:
                await self._stack.reload(config)

    def _say_draining(self, first: signal.Signals) -> None:
        streams = self._stack.num_streams
        what = f"draining {streams} stream{'s' if streams != 1 else ''}" if streams else "stopping"
        if lameduck_s := self._lameduck_s(first):
            what += f"; requests are served for {lameduck_s:g} s more"
        console.err().print(f"\n{what} (Ctrl-C again to stop now)", markup=False)

    def _show_banner(self, host: str, port: int) -> None:
        shown = reachable(host)
        authority = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
        facts = BannerFacts(
            url=f"http://{authority}/v1",
            models=self._stack.model_names,
            key=self._new_key,
            needs_key=not self._config.auth.disabled,
            ready_s=self._seconds_since_command(),
            open_to=None if is_loopback(host) else host,
            kernels=self._stack.kernels,
            advice=advice(self._stack.kernels),
            python=python_advice(python_build()),
        )
        show(console.out(), facts)

    def _seconds_since_command(self) -> float:
        """Since the process began (Python's own start included), or since `run` where that is not known."""
        try:
            # The 20th field after the command's name is the start, in ticks since boot: proc(5).
            ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
            uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return (self._clock.now_ns() - self._started_ns) / NS_PER_S
        return uptime_s - ticks / os.sysconf("SC_CLK_TCK")

    def _check_open_files(self) -> None:
        """Raise the soft limit as far as allowed: every connection is an open file."""
        wanted = WIRE_LIMITS.open_files
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, possible), hard))
        if possible < WIRE_LIMITS.connections_max:
            self._log.warning(
                "fewer open files are allowed than the connections that are served need", allowed=possible
            )
