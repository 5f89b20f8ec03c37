"""A cluster without machines: kmock's API server, and the controllers that a workload needs.

kmock keeps the objects and speaks HTTP. Here are the parts of Kubernetes that it leaves out: versions and
conflicts of objects, the scale subresource, label selectors, and what the Deployment's, StatefulSet's and
EndpointSlice's controllers do: pods come, one for each replica, at addresses that a test gives, and of too
many those go which cost least (a StatefulSet's in the order of their numbers). `make_ready` is the kubelet.
"""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import aiohttp.web
import kmock
from engine_stand_ins import VllmStandIn

DEPLOYMENTS, STATEFULSETS = "apps/v1/deployments", "apps/v1/statefulsets"
PODS, SLICES = "v1/pods", "discovery.k8s.io/v1/endpointslices"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


class KubeCluster(kmock.KubernetesEmulator):
    """Enter it and a `kmock.Server` around it; then `add` workloads."""

    def prepare(self, addresses: Sequence[str] = (), *, token: str = "", readies: bool = False) -> None:
        """Pods get these addresses, one after the other; `readies`: they are ready at once."""
        self.addresses = list(addresses) or [f"10.0.0.{number}" for number in range(1, 200)]
        self.token, self.readies, self.refuses = token, readies, dict[str, int]()
        self.version, self.made, self.deleted = 100, 0, list[str]()
        self.patches: list[tuple[str, Any]] = []
        self.asked: list[Any] = []
        """Every request."""
        self.before: list[Any] = []
        """Called before the next requests that change something, one for each."""

    def add(self, name: str, kind: str = DEPLOYMENTS, *, replicas: int = 0, port: int = 8000) -> None:
        self.port = port
        self.objects[self._key(kind, name)] = {
            "metadata": {"name": name, "namespace": "default", "resourceVersion": self._next(), "uid": name},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}}},
            "status": {"replicas": 0},
        }
        self.reconcile()

    def pods(self, app: str = "") -> list[Any]:
        """That are there, by name."""
        found = [obj for (kind, _, _), obj in self.objects.items() if _kind(kind) == PODS and not obj.deleted]
        return [obj for obj in found if app in ("", obj["metadata"]["labels"]["app"])]

    def replicas(self, name: str, kind: str = DEPLOYMENTS) -> int:
        return self.objects[self._key(kind, name)]["spec"]["replicas"]

    def annotation(self, name: str, key: str, kind: str = DEPLOYMENTS) -> str:
        return self.objects[self._key(kind, name)]["metadata"].get("annotations", {}).get(key, "")

    def make_ready(self, *names: str) -> None:
        """These pods' probes answer; of none: all."""
        for pod in self.pods():
            if not names or pod["metadata"]["name"] in names:
                pod.patch({"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        self.reconcile()

    def reconcile(self) -> None:
        """What the controllers do when something has changed."""
        for (kind, namespace, name), obj in list(self.objects.items()):
            if _kind(kind) not in (DEPLOYMENTS, STATEFULSETS) or obj.deleted:
                continue
            there = self.pods(name)
            wanted = obj["spec"]["replicas"]
            for _ in range(wanted - len(there)):
                self._make_pod(name, is_ordered=_kind(kind) == STATEFULSETS)
            for pod in self._surplus(there, len(there) - wanted, is_ordered=_kind(kind) == STATEFULSETS):
                self.deleted.append(pod["metadata"]["name"])
                pod.delete()
            obj.patch({"status": {"replicas": wanted}})
            self._tell_endpoints(namespace, name)

    async def _handle(self, request: Any) -> aiohttp.web.StreamResponse:
        self.asked.append(request)
        path, headers = request.url.path, {name.lower(): value for name, value in request.headers.items()}
        if self.token and headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        for part, status in self.refuses.items():
            if part in path:
                return _status(status, f"{path} is forbidden")
        if request.method == "GET" and request.subresource == "scale":
            return self._scale(request)
        if (
            request.method == "GET"
            and path.endswith(("/pods", "/endpointslices"))
            and "watch" not in request.params
        ):
            return self._list(request)
        if request.method not in ("PATCH", "PUT"):
            return await super()._handle(request)
        if self.before:
            self.before.pop(0)()
        if headers.get("content-type") != "application/merge-patch+json":
            return _status(415, "the body of the request was in an unknown format")
        obj = self.objects[request.resource, request.namespace, request.name]
        known = request.data.get("metadata", {}).get("resourceVersion", "")
        if known and known != obj["metadata"]["resourceVersion"]:
            return _status(
                409, "the object has been modified; please apply your changes to the latest version"
            )
        self.patches.append((path, request.data))
        await super()._handle(request)
        obj.patch({"metadata": {"resourceVersion": self._next()}})
        self.reconcile()
        return self._scale(request) if request.subresource == "scale" else aiohttp.web.json_response(obj.raw)

    def _scale(self, request: Any) -> aiohttp.web.StreamResponse:
        obj = self.objects[request.resource, request.namespace, request.name]
        meta = {key: obj["metadata"][key] for key in ("name", "namespace", "resourceVersion")}
        return aiohttp.web.json_response(
            {
                "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": meta,
                "spec": {"replicas": obj["spec"]["replicas"]},
                "status": {"replicas": obj["status"]["replicas"], "selector": f"app={request.name}"},
            }
        )  # fmt: skip

    def _list(self, request: Any) -> aiohttp.web.StreamResponse:
        key, _, value = request.params.get("labelSelector", "").partition("=")
        found = [
            obj.raw
            for (kind, _, _), obj in self.objects.items()
            if kind == request.resource
            and not obj.deleted
            and obj["metadata"].get("labels", {}).get(key) == value
        ]
        return aiohttp.web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": found})

    def _make_pod(self, app: str, *, is_ordered: bool) -> None:
        taken = {pod["metadata"]["name"] for pod in self.pods(app)}
        name = f"{app}-{self.made:04}" if not is_ordered else next(
            n for n in (f"{app}-{i}" for i in range(99)) if n not in taken
        )  # fmt: skip
        used = {pod["status"]["podIP"] for pod in self.pods()}
        address = next(each for each in self.addresses if each not in used)
        self.made += 1
        conditions = [{"type": "Ready", "status": "True"}] if self.readies else []
        body = {
            "metadata": {
                "name": name, "namespace": "default", "labels": {"app": app}, "resourceVersion": self._next(),
            },
            "status": {"podIP": address, "conditions": conditions},
        }  # fmt: skip
        if (key := self._key(PODS, name)) in self.objects:
            self.objects[key].create(body)
        else:
            self.objects[key] = body

    def _surplus(self, pods: list[Any], count: int, *, is_ordered: bool) -> list[Any]:
        if is_ordered:
            return sorted(pods, key=lambda pod: pod["metadata"]["name"], reverse=True)[: max(0, count)]

        def cost(pod: Any) -> int:
            return int(pod["metadata"].get("annotations", {}).get(DELETION_COST, "0"))

        return sorted(pods, key=cost)[: max(0, count)]

    def _tell_endpoints(self, namespace: str | None, app: str) -> None:
        ready = [pod for pod in self.pods(app) if pod["status"]["conditions"]]
        endpoints = [
            {
                "addresses": [pod["status"]["podIP"]], "conditions": {"ready": True},
                "targetRef": {"uid": pod["metadata"]["name"]},
            }
            for pod in ready
        ]  # fmt: skip
        body = {
            "metadata": {
                "name": f"{app}-1", "namespace": namespace, "resourceVersion": self._next(),
                "labels": {"kubernetes.io/service-name": app},
            },
            "addressType": "IPv4", "endpoints": endpoints, "ports": [{"name": "http", "port": self.port}],
        }  # fmt: skip
        key = self._key(SLICES, f"{app}-1")
        if key in self.objects:
            self.objects[key].patch(body)
        else:
            self.objects[key] = body
        update = self._buses[key[0]].put({"type": "MODIFIED", "object": self.objects[key].raw})
        self._telling = asyncio.get_running_loop().create_task(update)

    def _key(self, kind: str, name: str) -> tuple[Any, str, str]:
        return kmock.resource(kind), "default", name

    def _next(self) -> str:
        self.version += 1
        return str(self.version)


def _kind(resource: Any) -> str:
    group = f"{resource.group}/" if resource.group else ""
    return f"{group}{resource.version}/{resource.plural}"


def _status(code: int, message: str) -> aiohttp.web.StreamResponse:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}
    return aiohttp.web.json_response(body, status=code)


class ClusterThread:
    """A cluster on a thread of its own, for servers in other processes: one workload, whose pods are vLLM's
    stand-ins on loopback addresses, ready as soon as they are there.
    """

    def __init__(self, name: str, pods: int) -> None:
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._name, self._addresses = name, [f"127.0.0.{number}" for number in range(2, pods + 2)]
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),))
        self._thread.start()
        assert self._ready.wait(30), "the cluster does not come up"

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.stand_ins = [VllmStandIn() for _ in self._addresses]
        for each, address in zip(self.stand_ins, self._addresses, strict=True):
            each.host, each.port = address, self.stand_ins[0].port
            await each.start()
        async with KubeCluster() as self.cluster, kmock.Server(self.cluster) as server:
            self.cluster.prepare(self._addresses, readies=True)
            self.cluster.add(self._name, replicas=1, port=self.stand_ins[0].port)
            self.url = str(server.url).rstrip("/")
            self._ready.set()
            await self._over.wait()
        for each in self.stand_ins:
            await each.kill()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
