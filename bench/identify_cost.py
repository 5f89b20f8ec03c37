"""What it costs to know who is calling: microseconds of CPU per request, and times one BLAKE2b hash in the
same run.

    .venv/bin/python bench/identify_cost.py [--keys 100000] [--rounds 5] [--out FILE]

A stored key and a remembered token are the hot path; a token's first request pays for its signature.
"""

import argparse
import hashlib
import json
import logging
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time_ns

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from provenance import write_result

from penstock.clock import NS_PER_S, SystemClock
from penstock.config.tenancy import DEFAULT_TIERS, AuthConfig, JwtConfig
from penstock.config.tree import Config, ServerConfig
from penstock.gateway.http.exchange import RequestHead
from penstock.gateway.identity import api_keys
from penstock.gateway.identity.api_keys import edit_keys
from penstock.gateway.identity.tenancy import Access, Entrance, Tenancy
from penstock.gateway.identity.tenants import Tenants, read_tenants
from penstock.gateway.identity.tokens import ProviderKeys, TokenVerifier, parse_jwks
from penstock.telemetry.log import Log

CLOCK = SystemClock()
PLAIN_KEY = "sk-a-plain-key-0123456789"


def cost_us(work: Callable[[], object], times: int) -> float:
    begin_ns = process_time_ns()
    for _ in range(times):
        work()
    return (process_time_ns() - begin_ns) / times / 1000


def key_cases(num_keys: int, place: Path) -> dict[str, tuple[Callable[[], object], int]]:
    issued = [api_keys.issue(1, tenant=f"tenant-{i}") for i in range(num_keys)]
    edit_keys(place, lambda _: ([one.record for one in issued], None))
    config = Config(auth=AuthConfig(keys=(PLAIN_KEY,), keys_file=str(place)))
    read_us = cost_us(lambda: read_tenants(config, clock=CLOCK), 1)
    print(f"{num_keys} keys are read in {read_us / 1e6:.2f} s of CPU ({read_us / num_keys:.1f} us each)")
    tenancy = Tenancy(config, clock=CLOCK, log=Log(config.log, CLOCK))

    def case(key: str) -> tuple[Callable[[], object], int]:
        head = RequestHead(method="POST", path="/", headers={b"authorization": f"Bearer {key}".encode()})
        return lambda: tenancy.identify(head), 50_000

    return {
        "stored key": case(issued[num_keys // 2].key),
        "key of the configuration": case(PLAIN_KEY),
        **entrance_cases(tenancy, issued[num_keys // 2].key),
    }


def entrance_cases(tenancy: Tenancy, key: str) -> dict[str, tuple[Callable[[], object], int]]:
    """The checks around it: what every request with a key pays, and what one pays where no key is asked
    for.
    """
    is_open = Config(auth=AuthConfig(disabled=True))
    without = Tenancy(is_open, clock=CLOCK, log=Log(is_open.log, CLOCK))
    host = {b"host": b"127.0.0.1:8000"}
    page = {b"origin": b"http://127.0.0.1:8000", b"sec-fetch-site": b"same-origin"}
    found: dict[str, tuple[Callable[[], object], int]] = {}
    for name, table, headers in (
        ("stored key, at the entrance", tenancy, host | {b"authorization": f"Bearer {key}".encode()}),
        ("no key: Host", without, host),
        ("no key: Host and Origin", without, host | page),
    ):
        entrance = Entrance(table, ServerConfig())
        head = RequestHead(method="POST", path="/", headers=headers)
        found[name] = (
            lambda entrance=entrance, head=head: entrance.caller(Access.KEY, head, "127.0.0.1"),
            50_000,
        )
    return found


def token_cases() -> dict[str, tuple[Callable[[], object], int]]:
    config = JwtConfig(issuer="https://id.example", audience=("penstock",))
    pairs = {"RS256": rsa.generate_private_key(65537, 2048), "ES256": ec.generate_private_key(ec.SECP256R1())}
    kinds = {"RS256": RSAAlgorithm, "ES256": ECAlgorithm}
    jwks = [
        {**kinds[name].to_jwk(pair.public_key(), as_dict=True), "kid": name} for name, pair in pairs.items()
    ]
    keys = ProviderKeys(config, clock=CLOCK, log=Log(Config().log, CLOCK))
    keys._take(parse_jwks(json.dumps({"keys": jwks}).encode(), keys_max=8))
    found: dict[str, tuple[Callable[[], object], int]] = {}
    claims = {
        "iss": config.issuer,
        "aud": "penstock",
        "sub": "acme",
        "exp": CLOCK.wall_ns() // NS_PER_S + 3600,
    }
    for name, pair in pairs.items():
        tokens = TokenVerifier(config, keys, Tenants((), DEFAULT_TIERS, secret=b"bench"), clock=CLOCK)
        token = jwt.encode(claims, pair, name, headers={"kid": name}).encode()

        def verify(tokens: TokenVerifier = tokens, token: bytes = token) -> object:
            tokens.forget()
            return tokens.find(token)

        found[f"{name} token, the first time"] = (verify, 300)
        found[f"{name} token, remembered"] = (lambda tokens=tokens, token=token: tokens.find(token), 50_000)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as place:
        cases = {**key_cases(args.keys, Path(place) / "keys"), **token_cases()}
        data = b"k" * 59
        costs: dict[str, list[float]] = {name: [] for name in cases}
        ratios: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(args.rounds):
            base_us = cost_us(lambda: hashlib.blake2b(data, digest_size=32).digest(), 50_000)
            for name, (work, times) in cases.items():
                costs[name].append(cost_us(work, times))
                ratios[name].append(costs[name][-1] / base_us)
    for name in cases:
        low, high = min(ratios[name]), max(ratios[name])
        middle = statistics.median(costs[name])
        print(
            f"{name:30} {middle:8.2f} us   {statistics.median(ratios[name]):6.1f} x one hash ({low:.1f} to "
            f"{high:.1f})"
        )
    if args.out:
        write_result(args.out, {"keys": args.keys, "us_per_look": costs, "times_one_hash": ratios})


if __name__ == "__main__":
    main()
