"""What a gateway tells a worker about sleep; part of `protocol/worker.py`, which has `Asleep`, the answer."""

import msgspec


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Let go of the weights and the KV cache, unless there is work: an answer is never cut."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Load the weights again. To one that is awake it changes nothing."""


class StaysAwake(msgspec.Struct, frozen=True, tag="stays_awake"):
    """It was told to sleep, and has work."""

    requests: int
