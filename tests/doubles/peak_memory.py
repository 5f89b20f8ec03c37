"""`python peak_memory.py MODEL_DIR SETTINGS`: prints the peak memory after start-up, and after the worst
traffic there is.

SETTINGS are the engine's, as JSON. A process of its own, since the peak is the process's; memory is given out
as in a worker. The KV cache and the host tier are touched before: their memory is committed as it is first
used, and never more than was reserved.
"""

import json
import os
import sys
from pathlib import Path

import torch
from engine_driver import Driver

from penstock.engine.kv_cache import ThreadHostStore
from penstock.engine.memory import settle_malloc
from penstock.rng import stream
from penstock.types import SamplingParams


def peak_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    raise AssertionError("no VmHWM")


def main() -> None:
    settle_malloc()
    path, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    driver = Driver(path, **{"load_format": "random", "max_running": 16, "step_tokens": 256} | settings)
    vocab_size = driver.runner.info.vocab_size
    with torch.inference_mode():
        driver.runner._cache.tensor.fill_(0)
        if isinstance(driver.runner._host, ThreadHostStore):
            driver.runner._host._copier._slots.fill_(0)
    driver.runner.warm_up()
    before = peak_kib()
    random = stream(1, "worst traffic")
    prompts = [[random.randrange(vocab_size) for _ in range(random.randint(1, 300))] for _ in range(16)]
    params = [
        SamplingParams(
            temperature=random.choice([0.0, 0.5, 1.0, 5.0]),
            top_p=random.choice([0.5, 0.999, 1.0]),
            top_k=random.choice([0, 0, 50, 20_000]),
            min_p=random.choice([0.0, 0.1]),
            seed=index,
            frequency_penalty=random.choice([0.0, 1.0]),
            repetition_penalty=random.choice([1.0, 1.3]),
            logprobs=2,
            prompt_logprobs=random.choice([None, 2]),
            max_tokens=random.randint(1, 24),
        )
        for index in range(16)
    ]
    # Twice, so that what the first round left in the caches and in host memory is met again.
    for _ in range(2):
        answers = driver.ask(prompts, params)
        assert all(answer.error is None for answer in answers)
    assert driver.core.stats().running == 0
    print(before, peak_kib(), flush=True)
    os._exit(0)  # As a worker ends: the interpreter's own end and threads inside torch do not go together.


if __name__ == "__main__":
    main()
