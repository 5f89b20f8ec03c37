"""The placements of this gateway's models, and what is seen of their decisions: metrics, a sampled log line,
explanations.
"""

from collections.abc import Callable

from penstock import rng
from penstock.config.branch import extended
from penstock.config.routing import PlacementConfig
from penstock.policy.contracts import LeastLoaded, Placement
from penstock.policy.placement.decision_log import DecisionLog
from penstock.policy.placement.locality import Locality
from penstock.policy.placement.pick import Decision
from penstock.policy.placement.route import Router
from penstock.policy.placement.score import score_policy
from penstock.policy.placement_terms import PlacementTerms
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics


class Placements:
    """Makes the placement of every model, by its name."""

    def __init__(
        self,
        config: PlacementConfig,
        *,
        metrics: Metrics,
        log: Log,
        seed: int,
        locality: Callable[[str], Locality | None] = lambda _: None,
    ) -> None:
        """`seed` fixes every chance there is; `locality` tells where a model's prompts are cached, if anybody
        knows.
        """
        config = self._config = extended(config, PlacementTerms)
        self._metrics, self._log, self._seed = metrics, log, seed
        self._locality = locality
        self.decisions = DecisionLog(
            kept_max=config.decisions_kept,
            log_every=config.log_every,
            decided=self._count,
            write=self._write,
        )
        """The last ones, to be explained."""

    def of(self, route: str) -> Placement:
        """A model's own."""
        config = self._config
        if config.policy == "least_loaded":
            return LeastLoaded()
        draw = rng.stream(self._seed, f"placement/{route}").randrange
        return Router(route, config, draw, locality=self._locality(route), log=self.decisions)

    def _count(self, decision: Decision) -> None:
        self._metrics.placed(decision.route, decision.config.policy, decision.choice.reason)
        picked = decision.picked
        if picked is not None and decision.looked_up and decision.choice.reason not in ("none", "hold"):
            matched = picked.device_tokens + picked.host_tokens
            self._metrics.matched(decision.route, matched / max(1, decision.request.prompt_tokens))

    def _write(self, decision: Decision) -> None:
        picked, choice = decision.picked, decision.choice
        score = 0.0
        if picked is not None:
            score = score_policy(decision.config).score(decision.request, picked).total
        self._log.info(
            "placed",
            request_id=decision.request_id,
            model=decision.route,
            worker=picked.worker if picked is not None else "",
            reason=choice.reason,
            score=round(score, 4),
            candidates=len(decision.candidates),
            cached_tokens=picked.device_tokens + picked.host_tokens if picked is not None else 0,
            prompt_tokens=decision.request.prompt_tokens,
        )
