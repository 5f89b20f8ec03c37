"""Small workloads for simulations, by seed."""

import sys
from collections.abc import Iterator

from penstock import rng
from penstock.clock import NS_PER_S
from penstock.sim.traffic.prompts import Segment, SimRequest
from penstock.sim.world.world import PoolSpec, World, WorldSpec


def poisson(
    seed: int,
    per_s: float,
    seconds: float,
    *,
    tenants: int = 4,
    prompt: int = 300,
    output: int = 40,
    **fields: object,
) -> Iterator[SimRequest]:
    """Every tenant's prompts begin with its own 100 tokens; lengths vary by a factor of two either way."""
    random, number, at_s = rng.stream(seed, "load"), 0, 0.0
    while (at_s := at_s + random.expovariate(per_s)) < seconds:
        number += 1
        tenant = random.randrange(tenants)
        length, answer = (max(1, int(mean * 2 ** random.uniform(-1, 1))) for mean in (prompt, output))
        yield SimRequest(
            id=f"r{number}",
            at_ns=int(at_s * NS_PER_S),
            tenant=f"t{tenant}",
            prompt=(Segment(1 + tenant, 100), Segment(100 + number, length)),
            output_tokens=answer,
            **fields,
        )


def main() -> None:
    spec = WorldSpec(seed=3, pools=(PoolSpec(count=3),), gateways=2)
    print(World(spec, poisson(3, 12, 3)).run().digest)


if __name__ == "__main__":
    sys.exit(main())
