"""`penstock serve`: from flags to a running server, and back down again."""

import argparse
import sys

from penstock.cli.flags import Commands, Help, number, size
from penstock.cli.wiring.settings import effective_config, log_levels, printable_config
from penstock.clock import SystemClock
from penstock.config.checkpoints import check_local_models
from penstock.config.tree import MODEL_LEN_MIN

DTYPES = ("auto", "float32", "bfloat16")

DESCRIPTION = """\
Serve a model behind the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models, with streaming.

MODEL is a Hugging Face model directory, a hub id, or the name of a built-in demo model; without
MODEL and without -c it is penstock-demo."""

EPILOG = """\
A flag counts before the environment, the environment before the file, the file before the default.

environment:
  PENSTOCK_API_KEY       the key that clients must send; without any, serve makes one and prints it
  PENSTOCK_KEYS_FILE     file of hashed keys (see `penstock keys`)
  PENSTOCK_ADMIN_KEY     the key of `penstock top` and `drain`; one that serve makes may do that too
  PENSTOCK_SCRAPE_KEY    a key for /metrics and /status.json alone
  PENSTOCK_AUTH_SECRET   secret of the tenants' caches, the same for all gateways of the same workers
  PENSTOCK_SHARED_URL    Redis that gateways share their rate limits through (shared.url)
  PENSTOCK_HOST, PENSTOCK_PORT

SIGHUP reads the configuration again (tenants, keys, prices, budgets, workers); streams go on.
SIGTERM: /ready says no, requests are served for server.lameduck_s more (Ctrl-C on loopback: not at all),
then running answers end; a second one gives them a last error event and stops at once.
exit code: 0 stopped cleanly, 1 could not serve, 2 wrong configuration, 130 stopped at once

examples:
  penstock serve
  penstock serve ./Qwen3-0.6B --name qwen --port 9000
  penstock serve -c penstock.yaml --log-level debug
  penstock serve ./Qwen3-0.6B --kv-memory 2GiB --print-config > penstock.yaml"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model behind the OpenAI API",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve (default: penstock-demo)")
    parser.add_argument(
        "-c", dest="config", metavar="FILE", help="YAML configuration; --print-config shows every key"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the effective configuration and exit"
    )
    levels = log_levels()
    parser.add_argument(
        "--log-level", choices=levels, metavar="LEVEL", help=f"{', '.join(levels)} (default: info)"
    )
    door = parser.add_argument_group("front door")
    door.add_argument("--host", help="address to listen on (default: 127.0.0.1); others need a key")
    door.add_argument(
        "--port", type=number(int, 0, 65_535), metavar="N", help="0 takes a free one (default: 8000)"
    )
    door.add_argument(
        "--processes",
        type=number(int, 1, 64),
        metavar="N",
        help="gateway processes that share the port (default: 1)",
    )
    door.add_argument(
        "--api-key", metavar="KEY", help="better: PENSTOCK_API_KEY (other users can read command lines)"
    )
    door.add_argument("--no-auth", action="store_true", help="let everybody in (loopback addresses only)")
    door.add_argument("--take-over", action="store_true", help="once ready, replace the serve on this port")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--name", help="what clients call the model (default: last part of MODEL)")
    engine.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), help="how to compute (default: auto)"
    )
    engine.add_argument(
        "--quantization",
        choices=("none", "int8", "int4"),
        help="round the weights while loading, for speed and memory (default: none)",
    )
    engine.add_argument(
        "--load-format",
        choices=("safetensors", "random"),
        help="random: make weights up from config.json, for benchmarks (default: safetensors)",
    )
    engine.add_argument(
        "--max-model-len",
        type=number(int, MODEL_LEN_MIN, 100_000_000),
        metavar="N",
        help="tokens of prompt and answer together, at least 2 (default: the model's limit)",
    )
    engine.add_argument(
        "--kv-memory",
        type=size,
        metavar="SIZE",
        help="memory for the KV cache, such as 2GiB (default: measured)",
    )
    engine.add_argument(
        "--threads", type=number(int, 1, 4096), metavar="N", help="CPU threads (default: all)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock serve`."""
    clock = SystemClock()
    started_ns = clock.now_ns()
    config = effective_config(args)
    if args.print_config:
        sys.stdout.write(printable_config(config))
        return 0
    check_local_models(config.models)
    from penstock.cli.wiring.early import serve_until_stopped  # --help and `chat` do not pay for the gateway.

    return serve_until_stopped(
        config, clock, started_ns, lambda: effective_config(args), takes_over=args.take_over
    )
