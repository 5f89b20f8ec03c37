"""What a simulated worker is: its speed, its engine's settings, its memory."""

from dataclasses import dataclass, field

from penstock.config.engine_settings import EngineSettings
from penstock.kv.hashing import Computation
from penstock.planning.step_time import LinearStepTime, StepTime
from penstock.sim.world.adapters import SimAdapterSpec


@dataclass(slots=True, frozen=True, kw_only=True)
class SimWorkerSpec:
    """One kind of worker."""

    step_time: StepTime = field(default_factory=LinearStepTime)
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(step_tokens=2048, max_running=64))
    checkpoint: str = ""
    """What is in its model's directory, whatever the model is called."""
    dtype: str = "bf16"
    """Of its weights and its KV cache."""
    num_blocks: int = 8192
    """KV blocks of 16 tokens."""
    max_model_len: int = 32_768
    kind: str = ""
    """Name of the accelerator, for reports and prices."""
    cold_start_ns: int = 0
    """From being asked for to being ready."""
    is_external: bool = False
    """Gateways take it for a provider's: nothing is known of how it computes."""
    resumes: bool = True  # It returns token ids, so another worker can continue its streams.
    fast_forwards: bool = True
    """False does every step by itself: slower, and the same."""
    adapters: SimAdapterSpec | None = None  # None: whatever a request names is there.

    @property
    def identity(self) -> str:
        """Of what it computes, as a worker of ours makes it from its files and settings."""
        return Computation(
            checkpoint=self.checkpoint,
            tokenizer=self.checkpoint,
            dtype=self.dtype,
            kv_dtype=self.dtype,
            quantization=self.engine.quantization,
            kernels=self.kind,
        ).identity
