"""A runner that computes nothing: its tokens are letters from a hash, and some prompts make it misbehave.

Imported by tests, and by worker processes that tests start (`runner="scripted_runner:build_runner"`).
"""

import ctypes
import hashlib
import os
import threading
import time
from collections.abc import Callable

from step_gate import ENVIRONMENT, StepGate

from penstock.protocol.worker import ModelInfo
from penstock.schedule.plan import NewRow, Sampled, Scored, StepPlan, StepResult
from penstock.types import BLOCK_TOKENS, TokenLogprob

HANG, CRASH, NOT_A_NUMBER, DIE, HANG_LOCKED = 1, 2, 3, 4, 5
"""Prompts that begin with these make the step hang, raise, give NaN, kill the process, or hang without ever
letting go of the interpreter's lock."""
EOS = 256
VOCAB_SIZE = 257
NUM_BLOCKS = 4096
TWO_BYTES_SEED = 7
"""With this seed every character is two tokens."""


def scripted_token(seed: int, position: int) -> int:
    """The token at `position` (in prompt and answer together) of an answer with `seed`."""
    if seed == TWO_BYTES_SEED:
        return "é".encode()[position % 2]
    return ord("a") + hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=1).digest()[0] % 26


def scripted_text(seed: int, start: int, count: int) -> str:
    return bytes(scripted_token(seed, start + i) for i in range(count)).decode(errors="replace")


class ScriptedRunner:
    """`step_s` is how long a step takes; `SCRIPTED_STEP_S` sets it in worker processes, and `SCRIPTED_GATE` a
    gate.
    """

    def __init__(self, *, max_running: int = 64, step_s: float = 0.0, gate: StepGate | None = None) -> None:
        self.info = ModelInfo(
            model="scripted",
            architecture="Scripted",
            dtype="float32",
            num_parameters=0,
            vocab_size=VOCAB_SIZE,
            max_model_len=NUM_BLOCKS * BLOCK_TOKENS,
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            max_running=max_running,
        )
        self.pci_address = os.environ.get("SCRIPTED_PCI")
        self.step_s = step_s
        self._gate = gate
        self.num_steps = 0
        self.raises: Callable[[StepPlan], Exception | None] = lambda _plan: None
        """What a step raises, if it does."""
        self._rows: dict[int, NewRow] = {}

    def warm_up(self) -> None:
        pass

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        self._rows.update((new.row, new) for new in plan.new_rows)
        if (error := self.raises(plan)) is not None:
            raise error
        if self._gate is not None:
            self._gate.enter(plan.step)
        if self.step_s:
            time.sleep(self.step_s)
        sampled = [
            self._sample(work.row, work.num_computed + work.num_tokens) for work in plan.work if work.samples
        ]
        scored = tuple(
            self._score(work.row, work.num_computed, work.num_tokens) for work in plan.work if work.scores
        )
        return StepResult(plan.step, tuple(sampled), scored)

    def _score(self, row: int, first: int, num_tokens: int) -> Scored:
        """The log-probability of the token at position i is -i."""
        new = self._rows[row]
        count = new.sampling.prompt_logprobs
        end = min(first + num_tokens + 1, new.num_prompt_tokens)
        return Scored(
            row,
            tuple(
                TokenLogprob(new.token_ids[i], -float(i), tuple((97 + k, -0.5 - k) for k in range(count)))
                for i in range(first + 1, end)
            ),
        )

    def _sample(self, row: int, position: int) -> Sampled:
        new = self._rows[row]
        match new.token_ids[0]:
            case 1:
                threading.Event().wait()
            case 2:
                raise ZeroDivisionError("the script said so")
            case 3:
                return Sampled(row, 0, error="the logits are not numbers")
            case 4:
                os.kill(os.getpid(), 9)
            case 5:
                ctypes.PyDLL(None).pause()
            case _:
                pass
        token = scripted_token(new.sampling.seed, position)
        logprob = None
        if new.sampling.logprobs is not None:
            logprob = TokenLogprob(
                token, -0.5, tuple((token + i, -0.5 - i) for i in range(new.sampling.logprobs))
            )
        return Sampled(row, token, logprob)


def build_runner(model_path, config, clock, progress) -> ScriptedRunner:
    if model_path == "missing":
        from penstock.errors import CheckpointError

        raise CheckpointError("missing/config.json: no such file")
    if model_path == "never-ready":
        threading.Event().wait()
    for done in range(3):
        progress("reading the script", done, 3)
    gate = os.environ.get(ENVIRONMENT)
    return ScriptedRunner(
        max_running=config.max_running,
        step_s=float(os.environ.get("SCRIPTED_STEP_S", "0")),
        gate=StepGate(gate) if gate else None,
    )
