"""A pool whose workers are the pods of a Kubernetes Deployment or StatefulSet: it sets their number.

    look    the workload's scale, and its pods
    more    PATCH .../scale
    fewer   the pod with least to do drains; when its streams have ended it is marked as the first to be
            deleted (controller.kubernetes.io/pod-deletion-cost), then PATCH .../scale. A StatefulSet deletes
            the pod with the largest number, so that one drains.

How the pods are reached is discovery's business (fleet/kubernetes.py): here they are told by their address.

Several servers may have such a pool. The one that leads (leadership.py) marks the workload with the token of
its lease before it changes anything, and changes it only in the version in which it saw its own token: so an
order of a server that has lost its lease, however late it arrives, is refused by the API server.
"""

import os
from collections import deque
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from penstock.backends.http.client import HttpClient
from penstock.backends.http.small_answer import ProbeFailed, fetch
from penstock.clock import NS_PER_S, Clock
from penstock.config.fleet import KubernetesConfig
from penstock.config.scale import ScalePoolConfig
from penstock.errors import ConfigError
from penstock.fleet.kubernetes import ApiError, Metadata, api_client, api_server, refusal
from penstock.fleet.leadership import Leadership
from penstock.fleet.members import Members
from penstock.fleet.registry import Registry, Worker
from penstock.policy.capacity.signals import PoolState
from penstock.telemetry.log import Log
from penstock.types import WorkerId

ANNOTATION = "penstock.dev/leader"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LEAVES_FIRST = "-1000000"
CONFLICT, CONFLICTS_MAX = 409, 3
RECEIVED_S = 5.0
"""Another server's word counts for so long."""
PLACELESS_S = 300.0
"""Pods that find no machine for so long, or are not found, are no use to wait for: another pool may do."""
_ANSWER_BYTES_MAX = 8 * 1024 * 1024
T = TypeVar("T")


class ScaleSpec(msgspec.Struct, frozen=True):
    """Of a workload."""

    replicas: int = 0


class ScaleStatus(msgspec.Struct, frozen=True):
    """Of a workload; `selector` names its pods."""

    replicas: int = 0
    selector: str = ""


class Scale(msgspec.Struct, frozen=True):
    """The scale subresource (autoscaling/v1)."""

    metadata: Metadata
    spec: ScaleSpec = ScaleSpec()
    status: ScaleStatus = ScaleStatus()


class MarkedMetadata(msgspec.Struct, frozen=True):
    """Of a workload."""

    resource_version: str = msgspec.field(name="resourceVersion", default="")
    annotations: dict[str, str] | None = None


class Marked(msgspec.Struct, frozen=True):
    """A workload, of which only the mark of the leader counts."""

    metadata: MarkedMetadata


class PodMetadata(msgspec.Struct, frozen=True):
    """Which pod."""

    name: str
    deleted: str | None = msgspec.field(name="deletionTimestamp", default=None)


class PodCondition(msgspec.Struct, frozen=True):
    """One of a pod's."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class PodStatus(msgspec.Struct, frozen=True):
    """How a pod is, and where."""

    ip: str = msgspec.field(name="podIP", default="")
    conditions: list[PodCondition] | None = None

    def condition(self, kind: str) -> PodCondition | None:
        """The one of this type."""
        return next((each for each in self.conditions or () if each.type == kind), None)


class Pod(msgspec.Struct, frozen=True):
    """One pod."""

    metadata: PodMetadata
    status: PodStatus = PodStatus()

    @property
    def is_ready(self) -> bool:
        """By its readiness probe; one that is to end is not."""
        ready = self.status.condition("Ready")
        return ready is not None and ready.status == "True" and self.metadata.deleted is None

    @property
    def homeless(self) -> str:
        """Why no machine takes it; empty: one did, or nothing is said yet."""
        placed = self.status.condition("PodScheduled")
        return placed.message if placed is not None and placed.reason == "Unschedulable" else ""


class PodList(msgspec.Struct, frozen=True):
    """All pods of a workload."""

    items: list[Pod] | None = None


_scales, _marks = msgspec.json.Decoder(Scale), msgspec.json.Decoder(Marked)
_pods = msgspec.json.Decoder(PodList)


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolTools:
    """The tools of every such pool of a server."""

    members: Members
    registry: Registry
    clock: Clock
    log: Log
    leadership: Leadership | None = None
    """None: there is one server."""


class KubernetesPool:
    """See the module; a `SharedPool`."""

    def __init__(self, model: str, pool: ScalePoolConfig, config: KubernetesConfig, tools: PoolTools) -> None:
        """`config` says where the API server is, and the namespace.

        Raises:
            ConfigError: no API server is named, and this is not a pod.
        """
        self.model, self.name = model, pool.name
        self._members, self._registry = tools.members, tools.registry
        self._clock, self._log = tools.clock, tools.log
        self._config, self._leadership = config, tools.leadership
        self._address = api_server(config, os.environ)
        kind, _, workload = pool.workload.partition("/")
        self._is_ordered = kind == "statefulset"
        self._namespace = f"namespaces/{quote(config.namespace, safe='')}"
        self._path = f"/apis/apps/v1/{self._namespace}/{kind}s/{quote(workload, safe='')}"
        self._scale: Scale | None = None
        self._living: dict[str, Pod] = {}
        """By name, those that are to end left out."""
        self._ending = 0
        self._ids: dict[str, WorkerId] = {}
        """The workers that were seen in pods, by address."""
        self._leaving: dict[str, WorkerId | None] = {}
        """Pods that drain, or have drained, by name."""
        self._marked: set[str] = set()
        """Of them, those that go first when there are to be fewer."""
        self._cut: set[str] = set()
        """Of them, those whose end was ordered."""
        self._left_ns: dict[str, int] = {}
        """Since when they have left service, by pod."""
        self._followed: set[WorkerId] = set()
        """Workers that leave by another server's word."""
        self._busy: dict[str, tuple[int, frozenset[WorkerId]]] = {}
        """Workers that leave and have streams of another server, and when that was heard."""
        self._asked_ns: deque[int] = deque()
        self._known_ready: set[str] | None = None
        self._cold_s: list[float] = []
        self._stuck_ns: int | None = None
        self._trouble = ""

    # --- how it is ----------------------------------------------------------------------------------

    def state(self) -> PoolState:
        """See `ScalePool`."""
        serving = [pod for pod in self._staying() if pod.is_ready and self._serves(pod)]
        workers = [worker for pod in serving if (worker := self._worker(pod)) is not None]
        reported = [(each.backend.status.stats, each.backend.status.info) for each in workers]
        rows = [
            stats.rows_max if stats and stats.rows_max else info.max_running if info else 0
            for stats, info in reported
        ]
        wanted = self._num_wanted()
        return PoolState(
            name=self.name,
            ready=min(len(serving), wanted),
            pending=max(0, wanted - len(serving)),
            draining=len(self._leaving.keys() - self._cut) + self._ending,
            slots=sum(rows),
            trouble=self._trouble or self._stuck(),
        )

    def take_cold_starts(self) -> tuple[float, ...]:
        """See `ScalePool`."""
        taken, self._cold_s = self._cold_s, []
        return tuple(taken)

    async def look(self) -> None:
        """See `ScalePool`: ask the API server, and go on with what leaves."""
        try:
            async with self._client() as client:
                await self._look(client)
                if done := [name for name in self._leaving if name not in self._cut and self._is_over(name)]:
                    await self._end(client, done)
        except (ApiError, ConfigError, OSError) as error:
            self._say(f"{self._address}: {error}" if isinstance(error, OSError) else str(error))
        else:
            self._say("")

    async def resize(self, count: int) -> None:
        """See `ScalePool`."""
        if self._scale is None:
            return
        more = count - self._num_wanted()
        while more > 0 and (back := next((n for n in self._leaving if n not in self._marked), None)):
            worker_id = self._leaving.pop(back)
            if worker_id is not None:
                await self._members.release(worker_id)
            more -= 1
        for pod in self._to_leave()[: max(0, -more)]:
            self._begin_to_leave(pod)
        if more > 0:
            try:
                async with self._client() as client:
                    await self._set(client, more)
            except (ApiError, ConfigError, OSError) as error:
                self._say(f"{self._address}: {error}" if isinstance(error, OSError) else str(error))
            else:
                self._asked_ns.extend([self._clock.now_ns()] * more)

    # --- several servers ----------------------------------------------------------------------------

    def leaving(self) -> tuple[WorkerId, ...]:
        """See `SharedPool`."""
        return tuple(worker_id for worker_id in self._leaving.values() if worker_id is not None)

    async def follow(self, leaving: Collection[WorkerId]) -> tuple[WorkerId, ...]:
        """See `SharedPool`."""
        for worker_id in sorted(self._followed - set(leaving)):
            await self._members.release(worker_id)
        for worker_id in sorted(set(leaving) - self._followed):
            self._members.hold(worker_id, self._members.drain_timeout_s)
        self._followed = set(leaving)
        self._leaving.clear()
        return tuple(each for each in leaving if self._registry.get(each) is not None)

    def hear_busy(self, who: str, busy: Collection[WorkerId]) -> None:
        """See `SharedPool`."""
        self._busy[who] = self._clock.now_ns(), frozenset(busy)

    # --- its pods -----------------------------------------------------------------------------------

    def _num_wanted(self) -> int:
        """Pods that are to be there, without those that leave and those that somebody has taken out of
        service.
        """
        if self._scale is None:
            return 0
        away = [pod for pod in self._living.values() if pod.metadata.name in self._leaving]
        held = sum(self._is_held(pod) for pod in self._staying())
        return max(0, self._scale.spec.replicas - sum(p.metadata.name not in self._cut for p in away) - held)

    def _staying(self) -> list[Pod]:
        return [pod for name, pod in self._living.items() if name not in self._leaving]

    def _serves(self, pod: Pod) -> bool:
        """Whether requests go there: discovery has found it, and it is ready by this server's judgement."""
        worker = self._worker(pod)
        return worker is not None and worker.is_ready and not self._is_held(pod)

    def _is_held(self, pod: Pod) -> bool:
        worker_id = self._ids.get(pod.status.ip)
        return worker_id is not None and self._members.is_held(worker_id)

    def _worker(self, pod: Pod) -> Worker | None:
        worker_id = self._ids.get(pod.status.ip)
        return self._registry.get(worker_id) if worker_id is not None else None

    def _to_leave(self) -> list[Pod]:
        """In the order in which they leave: those that start, then those with least to do."""
        staying = [pod for pod in self._staying() if not self._is_held(pod)]
        if self._is_ordered:
            return sorted(staying, key=lambda pod: -_number(pod.metadata.name))

        def load(pod: Pod) -> tuple[bool, int, str]:
            worker = self._worker(pod)
            stats = worker.backend.status.stats if worker is not None else None
            busy = worker.backend.num_streams if worker is not None else 0
            return pod.is_ready, stats.running + stats.waiting if stats else busy, pod.metadata.name

        return sorted(staying, key=load)

    def _begin_to_leave(self, pod: Pod) -> None:
        name, worker_id = pod.metadata.name, self._ids.get(pod.status.ip)
        self._leaving[name], self._left_ns[name] = worker_id, self._clock.now_ns()
        if worker_id is not None:
            self._members.hold(worker_id, self._members.drain_timeout_s)

    def _is_over(self, name: str) -> bool:
        """Whether nothing runs there any more, from any server."""
        worker_id, now_ns = self._leaving[name], self._clock.now_ns()
        if worker_id is None:
            return True
        if self._leadership is not None:
            received_ns = int(RECEIVED_S * NS_PER_S)
            if now_ns - self._left_ns[name] < received_ns:  # Others may not have heard yet that it leaves.
                return False
            busy = [each for at_ns, each in self._busy.values() if now_ns - at_ns < received_ns]
            if any(worker_id in each for each in busy):
                return False
        return self._registry.get(worker_id) is None

    def _stuck(self) -> str:
        """Why no more can be had."""
        since_ns = self._stuck_ns
        if since_ns is None or self._clock.now_ns() - since_ns < PLACELESS_S * NS_PER_S:
            return ""
        why = next((pod.homeless for pod in self._living.values() if pod.homeless), "")
        if not why:
            return "pods are ready, and models[].discover finds no worker at their addresses"
        return f"pods find no machine: {why[:200]}"

    def _take(self, scale: Scale, pods: Sequence[Pod]) -> None:
        self._scale = scale
        self._living = {pod.metadata.name: pod for pod in pods if pod.metadata.deleted is None}
        self._ending = len(pods) - len(self._living)
        self._leaving = {name: each for name, each in self._leaving.items() if name in self._living}
        self._cut &= self._living.keys()
        self._marked &= self._living.keys()
        self._left_ns = {name: at_ns for name, at_ns in self._left_ns.items() if name in self._leaving}
        hosts = {_host(each.id): each.id for each in self._registry.of(self.model)}
        here = {pod.status.ip for pod in pods if pod.status.ip}
        self._ids = {ip: each for ip, each in self._ids.items() if ip in here}
        self._ids |= {ip: hosts[ip] for ip in here if ip in hosts}
        for pod in self._staying():  # Another server has led until now, and these were leaving.
            if self._ids.get(pod.status.ip) in self._followed:
                self._begin_to_leave(pod)
        self._followed.clear()
        ready = {name for name, pod in self._living.items() if pod.is_ready}
        now_ns = self._clock.now_ns()
        for _ in ready - (ready if self._known_ready is None else self._known_ready):
            if self._asked_ns:
                self._cold_s.append((now_ns - self._asked_ns.popleft()) / NS_PER_S)
        self._known_ready = ready
        is_stuck = any(
            pod.homeless or (pod.is_ready and pod.status.ip not in self._ids) for pod in self._living.values()
        )
        self._stuck_ns = (self._stuck_ns or now_ns) if is_stuck else None

    # --- the API ------------------------------------------------------------------------------------

    async def _look(self, client: HttpClient) -> None:
        scale = _decoded(_scales, await self._call(client, f"{self._path}/scale"))
        words = urlencode({"labelSelector": scale.status.selector})
        pods = _decoded(_pods, await self._call(client, f"/api/v1/{self._namespace}/pods?{words}"))
        self._take(scale, pods.items or [])

    async def _end(self, client: HttpClient, names: Sequence[str]) -> None:
        """Have pods deleted that are empty: these, since they cost least."""
        for name in names:
            path = f"/api/v1/{self._namespace}/pods/{quote(name, safe='')}"
            await self._call(client, path, {"metadata": {"annotations": {DELETION_COST: LEAVES_FIRST}}})
            self._marked.add(name)
        if await self._set(client, -len(names)):
            self._cut.update(names)

    async def _set(self, client: HttpClient, more: int) -> bool:
        """Change the number of pods; False: another server leads.

        Raises:
            ApiError: it is refused.
        """
        for attempt in range(CONFLICTS_MAX):
            if not await self._mark(client):
                return False
            scale = _decoded(_scales, await self._call(client, f"{self._path}/scale"))
            if self._leadership is not None and not self._leadership.token:
                return False
            patch = {
                "metadata": {"resourceVersion": scale.metadata.resource_version},
                "spec": {"replicas": max(0, scale.spec.replicas + more)},
            }
            try:
                self._scale = _decoded(_scales, await self._call(client, f"{self._path}/scale", patch))
            except ApiError as error:
                # Its pods' states are in its version, too: a conflict is common, and says little.
                if error.status != CONFLICT or attempt + 1 == CONFLICTS_MAX:
                    raise
                continue
            return True
        raise AssertionError("the last attempt returns or raises")

    async def _mark(self, client: HttpClient) -> bool:
        """Mark the workload with the token of this server's lease; False: it has a larger one, or none here.

        Raises:
            ApiError: it is refused, or another server has just changed it.
        """
        if self._leadership is None:
            return True
        token = self._leadership.token
        if not token:
            return False
        found = _decoded(_marks, await self._call(client, self._path)).metadata
        mark = (found.annotations or {}).get(ANNOTATION, "0")
        last = int(mark) if mark.isdecimal() else 0
        if last > token:
            self._log.warning("another server has led since", workload=self._path, token=token, other=last)
            self._leadership.outrun(last)
            return False
        if last < token:
            changed = {"resourceVersion": found.resource_version, "annotations": {ANNOTATION: str(token)}}
            await self._call(client, self._path, {"metadata": changed})
        return True

    async def _call(self, client: HttpClient, path: str, patch: Mapping[str, object] | None = None) -> bytes:
        body = msgspec.json.encode(patch) if patch is not None else b""
        try:
            status, answer = await fetch(
                client, path, _ANSWER_BYTES_MAX, body=body, patches=patch is not None
            )
        except ProbeFailed as error:
            raise ApiError(f"{self._address}: {error}") from error
        if status not in (200, 201):
            raise refusal(status, answer)
        return answer

    @asynccontextmanager
    async def _client(self) -> AsyncGenerator[HttpClient]:
        client = api_client(self._config, self._address, self._clock)
        try:
            yield client
        finally:
            client.close()

    def _say(self, trouble: str) -> None:
        """In the log, when it has changed."""
        if trouble and trouble != self._trouble:
            self._log.warning("a workload cannot be scaled", workload=self._path, why=trouble)
        self._trouble = trouble


def _host(worker_id: WorkerId) -> str:
    """The host of a worker at an address: "model@host:port"."""
    return worker_id.rpartition("@")[2].partition("/")[0].rpartition(":")[0].strip("[]")


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _decoded(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ApiError(f"the API server's answer cannot be read: {error}") from error
