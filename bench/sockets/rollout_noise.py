"""A real rollout of two equal versions, whose requests say how much times scatter, for
`bench.policy.rollout --fit`.

    python -m bench.sockets.rollout_noise [--requests N] [--streams N] [--model MODEL] --json FILE

One server with two versions of one model, half of the conversations each; prompts and answers of many
lengths, by several clients at once. The result has the server's own rollouts.json: sums, some kilobytes.
Wants an idle machine: times are what it measures. Of a model whose tokens take less than the slices in which
a processor is shared (`--model penstock-demo-mini`) it measures these.
"""

import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.harness import command_line, write_result
from bench.process import Served
from penstock.rng import stream

ADMIN = "admin-0123456789abcdef"
WORDS = ("the", "river", "runs", "down", "a", "pipe", "to", "turn", "wheels", "and", "light", "comes", "by")
MODEL = (
    "- {{path: {path}, name: river, version: {version}, engine: {{threads: 1, dtype: float32,"
    " kv_memory_bytes: 67108864, host_kv_memory_bytes: 0}}}}\n"
)


def question(number: int) -> dict[str, object]:
    draw = stream(number, "bench/rollout-noise")
    words = 4 + int(draw.lognormvariate(3.5, 0.8))
    return {
        "model": "river", "prompt": " ".join(draw.choice(WORDS) for _ in range(min(words, 300))),
        "max_tokens": min(96, 4 + int(draw.lognormvariate(3.2, 0.6))), "ignore_eos": True,
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--model", default="penstock-demo", help="of both versions (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="clients at once")
    args = parser.parse_args()
    assert args.json is not None, "--json says where the rollout goes"
    place = Path(tempfile.mkdtemp(prefix="penstock-rollout-"))
    config = (
        f"models:\n{MODEL.format(path=args.model, version=1)}{MODEL.format(path=args.model, version=2)}"
        f"auth: {{admin_keys: [{ADMIN}], keys: [{ADMIN}0]}}\nledger: {{directory: {place / 'ledger'}}}\n"
    )
    with Served(place, config) as server:
        plan = {
            "model": "river", "candidate": "river@2", "steps": [50], "requests_min": 10**6, "step_s": 86_400,
            "warm_up_requests": 20,
        }  # fmt: skip
        status, body = server.ask("POST", "/admin/rollouts", plan, {"Authorization": f"Bearer {ADMIN}"})
        assert status == 200, body
        began = time.monotonic()

        def ask(number: int) -> int:
            headers = {"Authorization": f"Bearer {ADMIN}0", "X-Penstock-Session": f"s{number // 4}"}
            return server.ask("POST", "/v1/completions", question(number), headers)[0]

        with ThreadPoolExecutor(args.streams) as clients:
            statuses = list(clients.map(ask, range(args.requests)))
        took_s = time.monotonic() - began
        print(f"{statuses.count(200)} of {len(statuses)} answered in {took_s:.0f} s")
    rollouts = json.loads((place / "ledger" / "rollouts.json").read_bytes())
    answered = {"answered": statuses.count(200), "asked": len(statuses), "seconds": round(took_s, 1)}
    write_result(args.json, {"model": args.model, **answered, "streams": args.streams, "rollouts": rollouts})


if __name__ == "__main__":
    main()
