"""Keys in a file, and one request with one: for the tests of tenants."""

import json
import urllib.error
import urllib.request
from pathlib import Path

from penstock.gateway.identity import api_keys
from penstock.gateway.identity.api_keys import Issued
from penstock.gateway.identity.key_file import edit_keys

NOW_S = 1_700_000_000


def add(path: Path, **fields) -> Issued:
    """Make a key and put it in the file."""
    issued = api_keys.issue(fields.pop("now_s", NOW_S), **{"tenant": "acme", **fields})
    edit_keys(path, lambda keys: ((*keys, issued.record), None))
    return issued


def ask(running, key: str, **fields) -> tuple[int, dict]:
    """Status and JSON of a chat."""
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"model": "tiny", "max_tokens": 1, "messages": messages, **fields})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{running.url}/v1/chat/completions", body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
