"""CPU of the two load clients for each request, and the first one's own bound: microseconds of this process.

    python bench/load_clients.py [--requests 400] [--rounds 7] [--json FILE]

`penstock bench`'s (penstock/bench/load.py) and the one of many tenants (bench/open_load.py) both ask the C
endpoint of bench/relay for streams of 64 chunks as fast as they are taken; the first in an open loop too.
Both send and read through one `Client`: what differs is what they note of an answer.
"""

import tempfile
import time
from pathlib import Path

import uvloop
from harness import command_line, in_turns, ratio, spread, table, write_result
from open_load import Kind, OpenLoad, Sender
from relay_process import Process, build, free_port

from penstock.bench.client import ApiAddress, Client
from penstock.bench.load import Level, LoadRun, RequestShape
from penstock.bench.prompts import PromptPlan, made
from penstock.clock import SystemClock

CHUNKS, WORDS, RATE = 64, 12, 200.0
SENDERS = (Sender("a", "default", 0.5), Sender("b", "default", 0.5))
KINDS = (Kind("only", WORDS, CHUNKS, 1.0),)


async def first(url: str, num: int) -> float:
    """CPU seconds of `penstock bench`'s client in an open loop."""
    client, clock = Client(ApiAddress.parse(url)), SystemClock()
    plan = PromptPlan(
        seed=1, run="x", prompt_tokens=WORDS, shared_tokens=0, tokens_per_word=1, overhead_tokens=0
    )
    shape = RequestShape(model="m", output_tokens=CHUNKS)
    run = LoadRun(client, shape, Level(name="x", requests_max=num, rate=RATE), seed=1, clock=clock)
    begun = time.process_time()
    await run.run(made(plan))
    spent = time.process_time() - begun
    assert run.tally.ok == num, run.tally
    await client.close()
    return spent / num


async def second(url: str, num: int) -> float:
    """CPU seconds of the client of many tenants, at the same rate."""
    clients = {each.name: Client(ApiAddress.parse(url)) for each in SENDERS}
    load = OpenLoad(clients, "m", SENDERS, KINDS, SystemClock())
    begun = time.process_time()
    await load.run("x", seed=1, rate=RATE, seconds=num / RATE, manners="leaves", drain_s=20)
    spent = time.process_time() - begun
    assert all(each.ok for each in load.asked), load.asked
    for client in clients.values():
        await client.close()
    return spent / len(load.asked)


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--requests", type=int, default=400)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="load-clients-") as name:
        place, port = Path(name), free_port()
        build(place)
        upstream = Process(str(place / "upstream"), str(port), str(CHUNKS), "0", log=place / "log")
        time.sleep(0.3)
        url = f"http://127.0.0.1:{port}/v1"
        try:
            found = in_turns(
                args.rounds,
                {
                    "penstock bench": lambda: uvloop.run(first(url, args.requests)) * 1e6,
                    "open_load": lambda: uvloop.run(second(url, args.requests)) * 1e6,
                },
            )
        finally:
            upstream.end()
    base = found["penstock bench"]
    rows = [(side, spread(values), ratio(values, base)) for side, values in found.items()]
    print(table(("load client", "us of CPU for each request", "x the first"), rows))
    write_result(args.json, {"us_per_request": found})


if __name__ == "__main__":
    main()
