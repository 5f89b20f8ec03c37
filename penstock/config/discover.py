"""Where workers are looked for while the server runs: `models[].discover`."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.branch import Branch, Count, Positive
from penstock.config.fleet import Engine
from penstock.types import Capability

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class KubernetesConfig(Branch, frozen=True, kw_only=True):
    """The endpoints of a service, as the cluster's API server tells them (EndpointSlices, list and watch)."""

    namespace: str
    service: str
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """The pods' port; 0: the one of `port_name`, or the service's only one."""
    port_name: str = ""
    """Name of the service's port."""
    api_server: str = ""
    """"https://host:port"; empty: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, which every pod
    has."""
    token_file: str = f"{SERVICE_ACCOUNT}/token"
    """Read again for every connection, since the cluster renews it; empty sends none."""
    ca_file: str = f"{SERVICE_ACCOUNT}/ca.crt"
    """Certificate authority of the API server."""


class DiscoverConfig(Branch, frozen=True, kw_only=True):
    """Workers that come and go. One of `dns` and `kubernetes` says where they are looked for."""

    dns: str = ""
    """"name:port": all its addresses (A, AAAA). "_service._tcp.name": its SRV records, which name the ports
    (extra `dns`)."""
    kubernetes: KubernetesConfig | None = None
    engine: Engine
    """What runs there, as in `workers`; and so everything up to `priorities`."""
    served_model: str = ""
    kind: str = ""
    api_key_env: str = ""
    max_model_len: Count = 0
    max_running: Count = 0
    priorities: bool = False
    lacks: tuple[Capability, ...] = ()
    scheme: Literal["http", "https"] = "http"
    """How workers of engines that are not ours are talked to."""
    kv_events_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """ZeroMQ PUB port of each worker's KV events; 0: it has none."""
    kv_replay_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """ZeroMQ ROUTER port that sends missed ones again; 0: there is none."""
    found_max: Positive = 256
    """Workers taken from here; more are reported and left out."""
    refresh_s: Annotated[float, Meta(ge=0.1)] = 5.0
    """DNS is asked this often."""
    timeout_s: Annotated[float, Meta(ge=0.01)] = 5.0
    """One question may take so long."""
