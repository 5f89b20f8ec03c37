"""Runs requests through the real scheduler and the real runner, with no process between."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import torch
from tiny_models import VOCAB_SIZE

from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.adapters.fetch import AdapterFetcher
from penstock.engine.adapters.manager import AdapterManager, AdapterRead
from penstock.engine.core import EngineCore, StepRunner, build_core
from penstock.engine.runner import Runner, load_runner
from penstock.protocol.worker import Submit
from penstock.protocol.worker_parts import LoadAdapter
from penstock.rng import stream
from penstock.schedule.plan import NewRow, RowWork, StepPlan
from penstock.types import BLOCK_TOKENS, FinishReason, RequestId, SamplingParams, TokenLogprob, Usage


def tiny_runner(path: Path, **config: object) -> Runner:
    settings: dict[str, object] = {
        "dtype": "float32",
        "kernels": "torch",
        "kv_memory_bytes": 8 * 1024 * 1024,
    } | config
    return load_runner(path, EngineSettings(**settings), lambda _stage, _done, _total: None)


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    error: str | None = None
    stop_token_id: int | None = None
    usage: Usage | None = field(default=None, compare=False)


class Driver:
    """One engine; `ask` is one call with several requests, which start together."""

    def __init__(self, path: Path, adapters: Mapping[str, Path] | None = None, **config: object) -> None:
        """`adapters`: directories of those that requests may name."""
        self.runner = tiny_runner(path, **config)
        settings: dict[str, object] = {"dtype": "float32"} | config
        self.core: EngineCore = build_core(self.runner, EngineSettings(**settings), b"k" * 32, SystemClock())
        self._asked = 0
        self._mail: SimpleQueue[AdapterRead] = SimpleQueue()
        if adapters is not None:
            reader, info = self.core.adapter_reader, self.runner.info
            assert reader is not None
            manager = AdapterManager(
                reader, AdapterFetcher(), SystemClock(),
                slots=info.adapter_slots, post=self._mail.put,
            )  # fmt: skip
            self.core.use_adapters(manager)
            for name, directory in adapters.items():
                self.core.order_adapter(LoadAdapter(name=name, path=str(directory)))
            for _ in adapters:
                self.core.take_adapter(self._mail.get())

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        resumed: Sequence[Sequence[int]] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> list[Answer]:
        """Answers to all prompts; `resumed`: what another engine has said to each already; `adapters`: which
        one each has.
        """
        answers: dict[RequestId, Answer] = {}
        named, befores = adapters or [""] * len(prompts), resumed or [()] * len(prompts)
        for prompt, params, so_far, adapter in zip(prompts, sampling, befores, named, strict=True):
            self._asked += 1
            request_id = RequestId(f"r{self._asked}")
            answers[request_id] = Answer()
            message = Submit(
                request_id=request_id,
                prompt=array("i", prompt).tobytes(),
                sampling=params,
                resumed=array("i", so_far).tobytes(),
                adapter=adapter,
            )
            self.core.submit(0, message, 0)
        while self.core.has_work or self.core.num_held:
            while self.core.num_held or not self._mail.empty():
                self.core.take_adapter(self._mail.get())
            for output in self.core.step().get(0, []):
                answer = answers[output.request_id]
                answer.token_ids += output.token_ids
                answer.logprobs += output.logprobs or ()
                answer.prompt_logprobs += output.prompt_logprobs
                if output.finish is not None:
                    answer.finish = output.finish.reason
                    answer.error = output.finish.error
                    answer.usage = output.finish.usage
                    answer.cached_tokens = output.finish.usage.cached_tokens
        return list(answers.values())


def distributions(path: Path, **config: object) -> torch.Tensor:
    """Log-probabilities [prompts, vocab] of the token after each of some fixed prompts."""
    return distributions_of(tiny_runner(path, **{"dtype": "bfloat16", "kernels": "native"} | config))


def distributions_of(runner: StepRunner) -> torch.Tensor:
    """As `distributions`, of a runner that takes 130 tokens in a step."""
    random = stream(8, "prompts")
    rows: list[torch.Tensor] = []
    sampling = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)
    for length in (1, 16, 33, 130) * 8:
        prompt = tuple(random.randrange(VOCAB_SIZE) for _ in range(length))
        blocks = tuple(range(-(-length // BLOCK_TOKENS)))
        new = NewRow(RequestId("r"), 0, prompt, length, sampling)
        reported = runner.run(StepPlan(1, (new,), (RowWork(0, 0, length, samples=True, new_blocks=blocks),)))
        logprob = reported.sampled[0].logprob
        assert logprob is not None
        row = torch.full((VOCAB_SIZE,), -torch.inf)
        for token, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            row[token] = value
        rows.append(row)
    return torch.stack(rows)
