"""What all endpoints share."""

from dataclasses import dataclass

from penstock.clock import Clock
from penstock.config.tree import Config
from penstock.errors import Draining
from penstock.gateway.dispatch import Dispatcher
from penstock.gateway.models import ModelTable
from penstock.gateway.tokenize_pool import TokenizePool
from penstock.kv.locality import KVLocality
from penstock.policy.decision_log import DecisionLog
from penstock.rng import IdSource


@dataclass(slots=True, kw_only=True)
class Services:
    """Handed to every endpoint."""

    config: Config
    models: ModelTable
    ids: IdSource
    clock: Clock
    tokenize: TokenizePool
    dispatcher: Dispatcher
    explained: DecisionLog
    """Which worker got which of the last requests, and why."""
    locality: KVLocality
    """Where prompts are cached; makes their keys."""
    falls_back: bool = False
    """Whether any model has another one to fall back to."""
    draining: bool = False

    def check_draining(self) -> None:
        """Refuse new work once the server is going away.

        Raises:
            Draining: it is.
        """
        if self.draining:
            raise Draining("The server is shutting down.")
