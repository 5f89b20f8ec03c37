"""An engine of a model that makes vectors, driven step by step."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.pooling.core import build_vector_core
from penstock.engine.pooling.load import build_any_runner
from penstock.protocol.worker import RequestFinished, Submit
from penstock.types import RequestId, SamplingParams

STEPS_MAX = 100_000


@dataclass
class Vectors:
    """What was told of one submission."""

    vectors: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    finish: RequestFinished | None = None

    @property
    def rows(self) -> torch.Tensor:
        return torch.stack([self.vectors[i] for i in range(len(self.vectors))])


class VectorDriver:
    """`ask` is one call with several submissions, which start together."""

    def __init__(self, path: Path, **config: object) -> None:
        settings: dict[str, object] = {
            "dtype": "float32",
            "kernels": "torch",
            "kv_memory_bytes": 8 * 1024 * 1024,
        }
        engine = EngineSettings(**(settings | config))
        self.clock = SystemClock()
        self.runner = build_any_runner(path, engine, self.clock, lambda _stage, _done, _total: None)
        self.core = build_vector_core(self.runner, engine, b"k" * 32, self.clock)
        self.reported: dict[RequestId, Vectors] = {}
        self._asked = 0

    def submit(self, texts: Sequence[Sequence[int]], **fields: object) -> RequestId:
        self._asked += 1
        name = RequestId(f"v{self._asked}")
        self.reported[name] = Vectors()
        message = Submit(
            request_id=name,
            prompt=array("i", [token for text in texts for token in text]).tobytes(),
            sampling=SamplingParams(max_tokens=1),
            inputs=tuple(map(len, texts)),
            **fields,
        )
        self.core.submit(0, message, self.clock.now_ns())
        return name

    def step(self) -> None:
        for output in self.core.step().get(0, ()):
            reported = self.reported[output.request_id]
            assert reported.finish is None, "nothing comes behind the end"
            for place, vector in output.vectors:
                assert place not in reported.vectors, "a text's vector comes once"
                reported.vectors[place] = torch.frombuffer(bytearray(vector), dtype=torch.float32)
            reported.finish = output.finish or reported.finish

    def run(self) -> None:
        for _ in range(STEPS_MAX):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("it does not end")

    def ask(self, *submissions: Sequence[Sequence[int]]) -> list[Vectors]:
        names = [self.submit(texts) for texts in submissions]
        self.run()
        return [self.reported[name] for name in names]
