"""The engine's process: `python -m penstock.engine.worker [MODULE TO IMPORT FIRST ...]`, started by a
launcher.

    main thread      load, warm up, then: take mail, run a step, hand over its outputs, again; asleep: wait
    worker-socket    an event loop with the gateways' connections (serve_socket.py)
    worker-parent    waits for the end of standard input: the parent is gone, so exit
    worker-watchdog  ends the process when steps do not advance (`StepWatch`)
    worker-sigterm   waits for SIGTERM (a handler could be missed: a thread about to sleep does not run it)

With no work the main thread waits in the mailbox. The process ends by draining (SIGTERM or `Drain`: exit
code 0), by its own failure (traceback, `WorkerFailed`, exit code 1), because it cannot serve what it was told
to (exit code 78), or with its parent. Ctrl-C is the parent's business.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    # Before any library starts threads of its own: one that does not block it would take it, and die of it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

import msgspec

from penstock.clock import NS_PER_MS, Clock, SystemClock, process_age_ns
from penstock.config.machine import CgroupMemory
from penstock.engine.adapters.fetch import AdapterFetcher
from penstock.engine.adapters.manager import AdapterManager
from penstock.engine.core import EngineCore, FollowsGrammars, StepRunner, build_core
from penstock.engine.grammar.vocabulary import Vocabulary, begin_vocabulary
from penstock.engine.kv_event_publisher import KVEventPublisher, open_publisher
from penstock.engine.machine_watch import FaultWatch, Remedy, watch_device
from penstock.engine.mailbox import DrainAsked, KVEventsAsked, Mailbox, Ordered, StepWatch
from penstock.engine.memory import settle_malloc
from penstock.engine.pooling.core import build_vector_core
from penstock.engine.serve_socket import ServerLimits, WorkerServer
from penstock.engine.sleep import Bed, WarmsUpAgain
from penstock.engine.startup import StartUp
from penstock.errors import DeviceFault, EngineFault, OperatorError
from penstock.protocol.address import WorkerLaunch, parse_address
from penstock.protocol.worker import (
    FALLING_ASLEEP,
    LOADING_WEIGHTS,
    WARMING_UP,
    Fault,
    Loading,
    ModelInfo,
    Ready,
    WorkerFailed,
)
from penstock.protocol.worker_parts import Sleep, StaysAwake, Wake, WorkerAdapters
from penstock.types import GRAMMAR_CAPABILITIES

EXIT_FAILED = 1
EXIT_CANNOT_SERVE = 78  # EX_CONFIG of sysexits.h: starting again would fail the same way.
LAUNCH_BYTES_MAX = 1024 * 1024
IMPORTING = "importing"
PROGRESS_INTERVAL_NS = 100 * NS_PER_MS
_PR_SET_PDEATHSIG = 1

Progress = Callable[[str, int, int], None]
"""Told (stage, done, total) while a model loads."""
RunnerFactory = Callable[..., StepRunner]
"""`factory(model_path, engine_config, clock, progress)`."""

_log = logging.getLogger(__name__)


def main() -> int:
    """Run one worker until it has drained or failed. Returns the exit code."""
    _die_with_parent()
    settle_malloc()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    clock, mailbox, ready = SystemClock(), Mailbox(), threading.Event()
    startup = StartUp(clock, age_ns=process_age_ns())
    _drain_on_sigterm(mailbox, ready)
    startup.begins(IMPORTING)
    for module in sys.argv[1:]:
        # The modules to load before it is known what to serve. `load` imports it again, and says what is
        # wrong with it.
        with contextlib.suppress(Exception):
            _imported(module)
    startup.begins("waiting for the launch line")
    launch = read_launch(sys.stdin.fileno())
    config = launch.engine
    limits = ServerLimits(
        config.connection_buffer_bytes_max, config.max_running + config.max_waiting, launch.key
    )
    server = WorkerServer(
        parse_address(launch.address), mailbox, limits, clock, shares_port=launch.shares_port
    )
    server.start()
    life = EngineLife(launch, server, mailbox, clock, ready, startup)
    try:
        life.run()
    except OperatorError as error:
        return _fail(server, error, EXIT_CANNOT_SERVE)
    except Exception as error:  # noqa: BLE001
        # The process boundary: any error is reported and ends the process.
        traceback.print_exc()
        return _fail(server, error, EXIT_FAILED)
    life.close()
    return 0


class EngineLife:
    """The state of one process, awake and asleep.

        run: load ──> steps ──Sleep, no work──> asleep ──Wake──> load ──> ...      a drain ends it from both

    Asleep it holds no weights, no KV cache and nothing that was made for them: only the libraries, the
    sockets and the grammars' vocabulary. It takes no request then: a gateway with a request sends `Wake`
    first.
    """

    def __init__(
        self,
        launch: WorkerLaunch,
        server: WorkerServer,
        mailbox: Mailbox,
        clock: Clock,
        ready: threading.Event,
        startup: StartUp,
    ) -> None:
        self._launch, self._server, self._mailbox, self._clock = launch, server, mailbox, clock
        self._ready, self._config, self._startup = ready, launch.engine, startup
        self._feed: KVEventPublisher | None = None
        self._fetcher = AdapterFetcher()
        self._closers: list[Callable[[], None]] = []
        self._bed = Bed(launch, clock)

    def run(self) -> None:
        """Return when it was asked to drain and nothing is left to do.

        Raises:
            OperatorError: the model cannot be served as it is configured.
        """
        # First, for it may be refused.
        publisher = open_publisher(self._config.kv_events)
        self._feed = KVEventPublisher(self._config.kv_events, self._clock, publisher)
        server = self._server
        watch = StepWatch(0, self._clock, lambda what: None)
        is_asleep = self._launch.asleep and self._bed.plan()
        while True:
            if is_asleep:
                self._ready.set()
                server.announce(self._bed.asleep())
                if not self._bed.rest(self._mailbox, server, self._feed):
                    return
            core = self._load(was_asleep=is_asleep)
            if core is None:
                continue
            if not self._closers:
                watch = self._watch(core)
            is_asleep = run_steps(core, self._mailbox, server, self._feed, watch)
            while is_asleep and (left := server.stop_taking(Loading(FALLING_ASLEEP))):
                # They are on their way here, or their grammars are compiled: no wake-up will come for them.
                server.report(StaysAwake(left))
                is_asleep = run_steps(core, self._mailbox, server, self._feed, watch)
            if not is_asleep:
                return
            self._fall_asleep(core)
            del core
            self._bed.clean()

    def _load(self, *, was_asleep: bool) -> EngineCore | None:
        """The engine, awake; None where it stays asleep."""
        began_ns = self._clock.now_ns()
        self._ready.clear()  # There is nothing to drain.
        place = self._bed.launch, self._server, self._clock
        try:
            # A wake-up is no start: the gateways are told how long one takes.
            core, info = load(*place, wakes=True) if was_asleep else load(*place, self._startup.begins)
        except OperatorError as error:
            if not was_asleep:
                raise
            _log.error("the model cannot be woken: %s", error)
            self._bed.why = str(error)
            return None
        gc.collect()
        gc.freeze()  # Loaded objects live as long as it is awake: no collection looks at them again.
        assert self._feed is not None, "it is made first"
        self._feed.follow(core.kv)
        self._bed.loaded(info, self._clock.now_ns() - began_ns)
        take_adapters(core, self._mailbox, self._clock, self._fetcher)
        self._ready.set()  # First: a peer that sees us ready may order a drain.
        self._server.publish(0, {}, core.stats())
        self._server.announce(Ready(msgspec.structs.replace(info, model=self._launch.model_name)))
        if not was_asleep:
            _log.info("%s", self._startup.report())
        return core

    def _fall_asleep(self, core: EngineCore) -> None:
        """Tell every gateway before anything is released."""
        if core.adapters is not None:
            core.adapters.close()
            self._server.publish_adapters(WorkerAdapters(()))
        assert self._feed is not None, "it is made first"
        if (events := self._feed.forget()) is not None:
            self._server.publish_kv_events(events)

    def _watch(self, core: EngineCore) -> StepWatch:
        """The watch over the process from its first step on."""
        config, server = self._config, self._server
        faults = _watch_faults(core, config.kernel_log, server)
        readings = watch_device(core.info.device_uuid, server.publish_readings)
        watch = StepWatch(config.stall_timeout_s, self._clock, lambda what: _end_stalled(server, what))
        self._closers += [readings.set, watch.close, faults.close]
        return watch

    def close(self) -> None:
        """The process ends."""
        for close in self._closers:
            close()
        if self._feed is not None:
            self._feed.close()
        self._server.close()
        self._fetcher.close()
        if self._server.grammars is not None:
            self._server.grammars.close()


def load(
    launch: WorkerLaunch,
    server: WorkerServer,
    clock: Clock,
    on_stage: Callable[[str], None] = lambda stage: None,
    *,
    wakes: bool = False,
) -> tuple[EngineCore, ModelInfo]:
    """Build the runner and the engine around it, telling the gateways about it, and `on_stage` of every
    stage; and what it can do.

    Raises:
        OperatorError: the model cannot be served as it is configured.
    """

    def tell(stage: str, done: int, total: int) -> None:
        on_stage(stage)
        server.announce(Loading(stage, done, total, wakes))

    progress = _throttled(tell, clock)
    progress(IMPORTING, 0, 0)
    module, _, factory = launch.runner.partition(":")
    build: RunnerFactory = getattr(_imported(module), factory)
    vocabulary = functools.cache(lambda: begin_vocabulary(Path(launch.model_path)))

    def on_progress(stage: str, done: int, total: int) -> None:
        # No earlier: how much memory is free is asked before weights are read, and must not depend on how far
        # a thread has come; and native kernels that compute with weights as they are report the first ones
        # when all is prepared for one long call: before that, whoever holds the interpreter holds them up.
        # One that was asleep has the vocabulary still.
        if stage == LOADING_WEIGHTS and done and server.grammars is None:
            vocabulary()
        progress(stage, done, total)

    runner = build(launch.model_path, launch.engine, clock, on_progress)
    progress(WARMING_UP, 0, 0)
    if wakes and isinstance(runner, WarmsUpAgain):
        runner.warm_up_again()
    else:
        runner.warm_up()
    on_stage("waiting for the vocabulary")
    info = _use_grammars(runner, vocabulary, server)
    on_stage("building the engine")
    build_engine = build_vector_core if runner.info.pooling else build_core
    return build_engine(runner, launch.engine, launch.hash_key, clock), info


def _use_grammars(
    runner: StepRunner, begun: Callable[[], Vocabulary | None], server: WorkerServer
) -> ModelInfo:
    """Let requests bring grammars, if the runner can follow them and the tokenizer is fit for it."""
    info = runner.info
    if not isinstance(runner, FollowsGrammars):
        _log.info("no structured output: this runner does not hold answers to grammars")
        return info
    if server.grammars is None:  # Else it was asleep.
        if (vocabulary := begun()) is None:
            _log.info("no structured output: the model has no tokenizer.json")
            return info
        try:
            from penstock.engine.grammar.compiler import GrammarCompiler
        except ImportError:
            _log.info("no structured output: it needs llguidance, which the extra 'engine' brings")
            return info
        tokens = vocabulary.tokens()
        if tokens is None:
            return info
        server.use_grammars(GrammarCompiler(tokens))
    assert server.grammars is not None, "they were just made"
    runner.use_grammars(server.grammars.tokens)
    return msgspec.structs.replace(info, capabilities=info.capabilities | GRAMMAR_CAPABILITIES)


def take_adapters(core: EngineCore, mailbox: Mailbox, clock: Clock, fetcher: AdapterFetcher) -> None:
    """Let requests name adapters, if the runner takes some."""
    if (reader := core.adapter_reader) is not None:
        info = core.info
        manager = AdapterManager(
            reader, fetcher, clock,
            slots=info.adapter_slots, post=mailbox.post,
        )  # fmt: skip
        core.use_adapters(manager)


def run_steps(
    core: EngineCore,
    mailbox: Mailbox,
    server: WorkerServer,
    feed: KVEventPublisher,
    watch: StepWatch,
) -> bool:
    """The step loop. Returns when nothing is left to do: False if it was asked to drain, True if to sleep."""
    draining, sleepy, step = False, False, 0
    while core.has_work or core.num_held or not draining:
        wait = not core.has_work and not core.use_idle_time()
        if wait:
            watch.rests()
        if core.adapters is not None:
            core.adapters.steps_run(not wait)
        gathers_s = core.gathers_s
        mail = mailbox.take(wait=wait or gathers_s > 0, sleep_s=gathers_s or core.rest_s)
        watch.begins()
        for each in mail:
            draining |= isinstance(each, DrainAsked)
            if isinstance(each, KVEventsAsked):
                _tell_kv_events(server, feed)
                server.start_kv_events(each.connection, feed.subscribe(each.epoch, each.from_sequence))
            elif isinstance(each, Ordered) and isinstance(each.order, Sleep | Wake):
                sleepy |= isinstance(each.order, Sleep)
            else:
                core.take_mail(each)
        if sleepy:
            if not (core.has_work or core.num_held or draining):
                watch.rests()
                return True
            sleepy = False
            now = core.stats()
            server.report(StaysAwake(now.running + now.waiting + core.num_held))
        if core.adapters is not None and core.adapters.changed:
            server.publish_adapters(core.adapters.reported())
        if mail:
            # Before the step: should it never return, then the gateway knows that there was work.
            server.publish(step, {}, core.stats())
        if core.gathers_s > 0:
            continue  # More may come, until a time.
        if core.has_work or core.sleep_s == 0:
            outputs = core.step()
            if core.num_steps != step or not core.has_work:
                watch.advanced()
            step, stats = core.num_steps, core.due_stats()
            if outputs or stats is not None:
                server.publish(step, outputs, stats)
        _tell_kv_events(server, feed)
    return False


def _tell_kv_events(server: WorkerServer, feed: KVEventPublisher) -> None:
    if (events := feed.flush()) is not None:
        server.publish_kv_events(events)


def read_launch(stdin: int) -> WorkerLaunch:
    """Read what to do from the first line of standard input, then watch the rest for its end."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(stdin, LAUNCH_BYTES_MAX)
        if not chunk or len(line) > LAUNCH_BYTES_MAX:
            raise SystemExit("the launcher must send one line of JSON and keep standard input open")
        line += chunk
    launch = msgspec.json.decode(line, type=WorkerLaunch)

    def watch_parent() -> None:
        while os.read(stdin, 4096):
            pass
        os._exit(0)  # No client is left to serve.

    _start_thread("worker-parent", watch_parent)
    return launch


def _fail(server: WorkerServer, error: Exception, exit_code: int) -> int:
    """Report the reason to connected gateways and on standard error, and return the exit code."""
    _log.error("%s: %s", type(error).__name__, error)
    server.announce(WorkerFailed(str(error), type(error).__name__))
    server.close()
    return exit_code


def _watch_faults(core: EngineCore, kernel_log: str, server: WorkerServer) -> FaultWatch:
    """Report what happens to the machine, and end the process where its device or its memory is lost."""

    def on_fault(kind: str, words: str, remedy: Remedy) -> None:
        _log.error("%s", words)
        server.report(Fault(kind, words))
        if remedy is not Remedy.NOTE:
            # The main thread may hang in a device that is gone: no other thread can end the process.
            code = EXIT_CANNOT_SERVE if remedy is Remedy.END else EXIT_FAILED
            os._exit(_fail(server, DeviceFault(words), code))

    log = Path(kernel_log) if kernel_log and core.device is not None else None
    watch = FaultWatch(
        device=core.device or "", kernel_log=log, memory=CgroupMemory.of_self(), on_fault=on_fault
    )
    watch.start()
    return watch


def _imported(name: str) -> ModuleType:
    """The module, without looks at what importing makes: several hundred thousand objects that stay, a sixth
    of the time that torch takes.
    """
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _end_stalled(server: WorkerServer, what: str) -> None:
    """The main thread is stuck, so no other thread can end the process."""
    os._exit(_fail(server, EngineFault(what), EXIT_FAILED))


def _throttled(tell: Progress, clock: Clock) -> Progress:
    """Pass on a new stage and its end at once, and progress within one only every so often."""
    last_stage, last_ns = "", 0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal last_stage, last_ns
        now_ns = clock.now_ns()
        if stage != last_stage or 0 < total == done or now_ns - last_ns >= PROGRESS_INTERVAL_NS:
            last_stage, last_ns = stage, now_ns
            tell(stage, done, total)

    return progress


def _die_with_parent() -> None:
    """Ask the kernel to kill us when the thread that started us ends (Linux), even if we hang."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _drain_on_sigterm(mailbox: Mailbox, ready: threading.Event) -> None:
    """Turn SIGTERM into mail; while the model still loads there is nothing to drain, so it ends us."""

    def wait() -> None:
        while True:
            signal.sigwait({signal.SIGTERM})
            if not ready.is_set():
                os._exit(128 + signal.SIGTERM)
            mailbox.post(DrainAsked())

    _start_thread("worker-sigterm", wait)


def _start_thread(name: str, target: Callable[[], None]) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()


if __name__ == "__main__":
    # Not sys.exit: tearing torch down takes long and may hang, and nothing is left to be written.
    code = main()
    sys.stderr.flush()
    os._exit(code)
