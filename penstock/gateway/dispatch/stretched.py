"""Says in the log when a machine is too slow for what is promised, and what holds there instead
(policy/admission/promise.py).
"""

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.routing import AdmissionConfig
from penstock.policy.admission.promise import IDLE_FACTOR
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.telemetry.log import Log

PROMPT_TOKENS = 256
"""The prompt that the log speaks of: an ordinary question with its instructions."""


class StretchedPromises:
    """One line for each model, as soon as it is known."""

    def __init__(self, config: AdmissionConfig, log: Log) -> None:
        self._config, self._log = config, log
        self._said: set[str] = set()

    def look(self, model: str, lane: ModelQueue | None) -> None:
        """See what the model's requests have taken so far."""
        target_ms = self._config.ttft_target_ms
        if lane is None or not target_ms or model in self._said:
            return
        holds_ns = IDLE_FACTOR * lane.pace.idle_ttft_ns(PROMPT_TOKENS, PROMPT_TOKENS)
        if holds_ns > target_ms * NS_PER_MS:
            self._said.add(model)
            self._log.warning(
                "this machine is too slow for the promised time to the first token",
                model=model,
                promised_s=target_ms / 1000,
                holds_s=round(holds_ns / NS_PER_S, 2),
                prompt_tokens=PROMPT_TOKENS,
            )
