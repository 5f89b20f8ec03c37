"""Which pods of a service take requests, from its EndpointSlices (Kubernetes, discovery.k8s.io/v1). Pure.

A service has any number of slices, and an endpoint may be in two of them for a moment. A pod of a service
with two address families is in slices of both. A watch tells of whole slices.
"""

from typing import Literal

import msgspec

from penstock.config.fleet import KubernetesConfig
from penstock.fleet.sources.found import DiscoveredAddress


class Conditions(msgspec.Struct, frozen=True):
    """What is known of an endpoint; null is unknown, which counts as ready."""

    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct, frozen=True):
    """The pod."""

    uid: str = ""


class SliceEndpoint(msgspec.Struct, frozen=True):
    """One endpoint. Its addresses are the same pod's, and the first is as good as any."""

    addresses: list[str]
    conditions: Conditions = Conditions()
    target: TargetRef | None = msgspec.field(name="targetRef", default=None)


class SlicePort(msgspec.Struct, frozen=True):
    """One port of all endpoints of a slice; null is all ports."""

    name: str | None = None
    port: int | None = None


class Metadata(msgspec.Struct, frozen=True):
    """Which object, in which version."""

    name: str = ""
    resource_version: str = msgspec.field(name="resourceVersion", default="")


class Slice(msgspec.Struct, frozen=True):
    """One EndpointSlice. Of a bookmark only the version is there."""

    metadata: Metadata
    address_type: str = msgspec.field(name="addressType", default="IPv4")
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None


class ListMetadata(msgspec.Struct, frozen=True):
    """The version of a list, and where it goes on."""

    resource_version: str = msgspec.field(name="resourceVersion", default="")
    next_token: str = msgspec.field(name="continue", default="")


class SliceList(msgspec.Struct, frozen=True):
    """One page of a list."""

    metadata: ListMetadata
    items: list[Slice] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch. Of an ERROR the object is a `ApiStatus`."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class ApiStatus(msgspec.Struct, frozen=True):
    """What the API server says instead of an answer."""

    code: int = 0
    message: str = ""


class EndpointSlices:
    """The slices of one service, as far as they are known."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._slices: dict[str, Slice] = {}

    def replace(self, slices: list[Slice]) -> None:
        """These are all there are."""
        self._slices = {each.metadata.name: each for each in slices}

    def put(self, found: Slice) -> None:
        """A slice is new, or another one now."""
        self._slices[found.metadata.name] = found

    def drop(self, found: Slice) -> None:
        """A slice is there no more."""
        self._slices.pop(found.metadata.name, None)

    def endpoints(self) -> set[DiscoveredAddress]:
        """Where requests may go: ready, not about to end, once for each pod."""
        pods: dict[str, DiscoveredAddress] = {}
        # IPv6 first, so that of a pod with both the IPv4 address is left.
        for found in sorted(self._slices.values(), key=lambda each: each.address_type, reverse=True):
            port = self._port(found)
            for endpoint in found.endpoints or ():
                if port and endpoint.addresses and _takes_requests(endpoint.conditions):
                    address = endpoint.addresses[0]
                    uid = endpoint.target.uid if endpoint.target is not None else ""
                    pods[uid or address] = DiscoveredAddress(address, port)
        return set(pods.values())

    def _port(self, found: Slice) -> int:
        """The port of a slice's endpoints; 0 if it does not have the one that is wanted."""
        wanted = self._config.port
        if wanted and isinstance(wanted, int):
            return wanted
        named = [port.port for port in found.ports or () if port.port and (not wanted or port.name == wanted)]
        return named[0] if len(named) == 1 else 0


def _takes_requests(conditions: Conditions) -> bool:
    return conditions.ready is not False and not conditions.terminating
