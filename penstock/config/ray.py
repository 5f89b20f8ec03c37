"""How workers are put on a Ray cluster: the section `fleet.ray`."""

from typing import Annotated

from msgspec import Meta

from penstock.config.branch import Branch, Seconds


class RayConfig(Branch, frozen=True, kw_only=True):
    """Workers as Ray actors.

    Every machine of the cluster needs this version of Penstock and the model at the same path.
    """

    address: str = "auto"
    """The cluster: "host:6379", or "auto" for the one of this machine (or of RAY_ADDRESS)."""
    num_cpus: Annotated[float, Meta(ge=0)] = 1.0
    """Cores that Ray sets aside for one worker; with `engine.threads` 0 it computes on as many."""
    num_gpus: Annotated[float, Meta(ge=0)] = 0.0
    resources: dict[str, Annotated[float, Meta(ge=0)]] = {}  # noqa: RUF012 - msgspec copies it.
    """Further resources of one worker, by the names that the cluster's machines were started with."""
    place_timeout_s: Seconds = 60.0
    """A worker for which the cluster has no room within so long cannot be started."""
    answer_timeout_s: Seconds = 2.0
    """When a worker's connection is lost its actor has so long to answer; if it does not, the worker is
    started elsewhere. (Ray itself takes about 14 s to see that a machine is gone.)"""
