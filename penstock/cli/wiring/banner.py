"""What `serve` prints when it is ready: everything that somebody needs to send a first request."""

import shlex
import socket
from dataclasses import dataclass

import msgspec
from rich.console import Console

QUESTION = "What is Penstock?"


@dataclass(slots=True, frozen=True, kw_only=True)
class BannerFacts:
    """What the banner tells."""

    url: str
    """Base URL, with /v1."""
    models: tuple[str, ...]
    key: str
    """The key that was made at this start; empty if it was configured (then it is not shown) or none is
    needed."""
    needs_key: bool
    ready_s: float
    """From the command to now."""
    open_to: str | None = None
    """The address that it listens on, if that is not only this machine."""


def show(console: Console, facts: BannerFacts) -> None:
    """Print the banner. Wrapping is off, so that every line can be copied."""

    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    line()
    line(f"Penstock is ready after {facts.ready_s:.1f} s.", "bold green")
    line()
    line(f"  API        {facts.url}")
    if facts.open_to:
        line(f"  open to    other machines (listens on {facts.open_to})")
    line(f"  models     {', '.join(facts.models)}")
    line(f"  key        {_key_note(facts)}")
    line(f"  dashboard  {facts.url.removesuffix('/v1')}/")
    line()
    line(curl_line(facts))
    line()
    line(python_snippet(facts))
    line()
    line("Or talk to it: penstock chat        Ctrl-C drains and stops.", "dim")


def _key_note(facts: BannerFacts) -> str:
    if not facts.needs_key:
        return "none is needed"
    if facts.key:
        return f"{facts.key}  (made for this run; set PENSTOCK_API_KEY for one that stays)"
    return "as configured"


def curl_line(facts: BannerFacts) -> str:
    """A command that streams an answer; one line, quoted for a shell."""
    message = {"role": "user", "content": QUESTION}
    body = msgspec.json.encode({"model": facts.models[0], "stream": True, "messages": [message]}).decode()
    auth = f' -H "Authorization: Bearer {_shell_key(facts)}"' if facts.needs_key else ""
    content = " -H 'Content-Type: application/json'"
    return f"curl -N {facts.url}/chat/completions{auth}{content} -d {shlex.quote(body)}"


def _shell_key(facts: BannerFacts) -> str:
    return facts.key if facts.key else "$PENSTOCK_API_KEY"


def python_snippet(facts: BannerFacts) -> str:
    """The same with the openai package (`pip install openai`)."""
    if not facts.needs_key:
        key, imports = '"none"', ""
    elif facts.key:
        key, imports = f'"{facts.key}"', ""
    else:
        key, imports = 'os.environ["PENSTOCK_API_KEY"]', "import os\n"
    return f"""{imports}from openai import OpenAI
client = OpenAI(base_url="{facts.url}", api_key={key})
stream = client.chat.completions.create(
    model="{facts.models[0]}", stream=True, messages=[{{"role": "user", "content": "{QUESTION}"}}])
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)"""


# The address under which others find a server that listens on all of this machine's.

_EVERYWHERE = {
    "0.0.0.0": (socket.AF_INET, "198.51.100.1", "127.0.0.1"),
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}
"""For each: an address reserved for documentation (RFC 5737, RFC 3849), and loopback's."""


def reachable(host: str) -> str:
    """`host`, or the address that this machine would send from to the world, where it listens on all;
    loopback if there is none.
    """
    if host not in _EVERYWHERE:
        return host
    family, stranger, loopback = _EVERYWHERE[host]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((stranger, 9))  # Chooses a route; a datagram socket sends nothing here.
            return str(probe.getsockname()[0])
    except OSError:
        return loopback
