"""Limits inside a tenant over HTTP: two gateway processes, two keys, several users."""

import asyncio
import json
from pathlib import Path

import pages
import pytest
from stand_in_thread import MODEL, Serve
from tenant_keys import add

from penstock.bench.client import ApiAddress, Client, ClientLimits

pytestmark = pytest.mark.timeout(240)

PROCESSES = 2


async def asked(gateway: Serve, key: str, user: str, times: int) -> list[bytes]:
    """Ask so often, each on a new connection, so in either process: words of the refusals, empty if none."""
    limits = ClientLimits(idle_connections_max=0)
    client, found = Client(ApiAddress.parse(gateway.server.url), key=key, limits=limits), list[bytes]()
    for _ in range(times):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "user": user}
        answer = await client.post("/completions", json.dumps(body).encode())
        assert answer.status in (200, 429), answer.body
        found.append(answer.body if answer.status == 429 else b"")
    await client.close()
    return found


def test_the_pages_tenant_keeps_its_keys_and_users_apart(tmp_path: Path) -> None:
    (config,) = [each for each in pages.configs("limits") if each.tenants]
    (tenant,) = config.tenants
    assert tenant.per_user is not None
    assert tenant.per_key is not None
    per_user, per_key = tenant.per_user.requests_per_minute, tenant.per_key.requests_per_minute
    facts = (
        f"requests_per_minute: {tenant.requests_per_minute}, "
        f"per_user: {{requests_per_minute: {per_user}}}, per_key: {{requests_per_minute: {per_key}}}"
    )
    place = tmp_path / "gateway"
    gateway = Serve(place, None, {tenant.id: facts, "other": facts}, processes=PROCESSES)
    other_key = add(place / "keys.jsonl", tenant=tenant.id).key
    try:
        gateway.server.wait_ready()
        one_key = gateway.keys[tenant.id]
        words = asyncio.run(asked(gateway, one_key, "ann", 3 * per_user))
        granted = words.count(b"")
        # A lease of each process may be over, and what refills meanwhile.
        assert per_user <= granted <= per_user + PROCESSES + 2, granted
        assert all(b"Rate limit of this user reached" in word for word in words if word)
        assert asyncio.run(asked(gateway, one_key, "bob", 1)) == [b""]
        assert asyncio.run(asked(gateway, gateway.keys["other"], "ann", 2)) == [b""] * 2, "another's ann"
        users = [f"user-{i}" for i in range(3 * per_key)]
        words = [asyncio.run(asked(gateway, one_key, user, 1))[0] for user in users]
        refused = [word for word in words if word]
        assert refused
        assert all(b"Rate limit of this key reached" in word for word in refused)
        assert asyncio.run(asked(gateway, other_key, "dan", 1)) == [b""]
    finally:
        gateway.kill()
