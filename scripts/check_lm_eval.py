"""Run lm-eval's `local-completions` against `penstock serve`, and compare each log-likelihood with what
transformers computes of the same checkpoint: alone, batched, and once more from the prefix cache.

`make test-lm-eval` installs lm-eval first. 0 if every value is within `TOLERANCE`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "penstock-demo"
TASKS, TASK = ROOT / "examples" / "lm-eval", "penstock_capitals"
TOLERANCE = 1e-3
PATIENCE_S = 120.0
KEY = "sk-lm-eval-0123456789"


def main() -> int:
    """Carry it out."""
    with tempfile.TemporaryDirectory(prefix="penstock-lm-eval-") as name:
        place = Path(name)
        log = place / "serve"
        command = [sys.executable, "-m", "penstock", "serve", str(MODEL), "--port", "0", "--dtype", "float32"]
        with log.open("w") as out:
            server = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PENSTOCK_API_KEY": KEY}
            )
        try:
            url = _url(log, server)
            worst = 0.0
            for what, batch in (("one by one", 1), ("batched", 16), ("batched, cached", 16)):
                found = run_lm_eval(place / what, url, batch)
                errors = [abs(theirs - ours) for theirs, ours in found]
                worst = max(worst, *errors)
                print(
                    f"{what}: {len(errors)} log-likelihoods, largest difference {max(errors):.2e}", flush=True
                )
        finally:
            server.terminate()
            server.wait(30)
    return 0 if worst <= TOLERANCE else 1


def run_lm_eval(place: Path, url: str, batch: int) -> list[tuple[float, float]]:
    """Every log-likelihood of the task: as transformers computes it, and as lm-eval heard it from us."""
    arguments = (
        f"model={MODEL.name},tokenizer={MODEL},base_url={url}/v1/completions,num_concurrent=4,max_retries=1"
    )
    lm_eval = Path(os.environ.get("VENV", ".venv")) / "lm-eval" / "bin" / "python"
    done = subprocess.run(
        [
            str(lm_eval), "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments,
            "--include_path", str(TASKS), "--tasks", TASK, "--batch_size", str(batch), "--log_samples",
            "--output_path", str(place),
        ],
        cwd=ROOT, text=True, capture_output=True, check=False,
        env={**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")
    (samples,) = place.rglob("samples_*.jsonl")
    pairs: list[tuple[float, float]] = []
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        for request, answer in zip(sample["arguments"].values(), sample["resps"], strict=True):
            pairs.append((expected(request["arg_0"], request["arg_1"]), float(answer[0][0])))
    return pairs


def expected(context: str, continuation: str) -> float:
    """The continuation's log-likelihood, by transformers, with lm-eval's way of cutting the two apart."""
    whole = _tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
    start = len(_tokenizer(context, add_special_tokens=False)["input_ids"])
    with torch.inference_mode():
        logprobs = _model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
    return sum(float(logprobs[i - 1, whole[i]]) for i in range(start, len(whole)))


def _url(log: Path, server: subprocess.Popen[bytes]) -> str:
    deadline = monotonic() + PATIENCE_S
    while monotonic() < deadline and server.poll() is None:
        said = log.read_text()
        if "Ctrl-C drains" in said and (found := re.search(r"API +(http://[^/\s]+)", said)):
            return found[1]
        sleep(0.1)
    sys.exit(f"penstock serve is not ready:\n{log.read_text()}")


_tokenizer = AutoTokenizer.from_pretrained(MODEL)
_model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

if __name__ == "__main__":
    sys.exit(main())
