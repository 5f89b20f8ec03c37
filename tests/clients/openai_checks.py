"""Every endpoint and parameter of docs/api.md, asked with the `openai` package: sync and async, whole and
streamed. Prints a table.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=.. python tests/clients/openai_checks.py MODEL

An answer passes if the parameter did what it says, as far as an answer shows it. A parameter that the page
says is refused must be refused by name. The exit status is that of all checks. With `--peer` the server is
another one (vLLM, say): nothing is expected of it, and only endpoints of OpenAI's are asked.
"""

import argparse
import asyncio
import collections
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from openai import APIStatusError, AsyncOpenAI, OpenAI
from openai_parameters import BY_MODEL, Answer, Asked, asked_of, body_of, request_of

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
SECTIONS = {
    "chat": "## Parameters of chat completions",
    "completions": "## Parameters of plain completions",
    "responses": "## Parameters of responses",
}


def table_of(title: str) -> Iterator[list[str]]:
    """The rows of the first table below a title."""
    lines = iter(PAGE.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line == title:
            break
    for line in lines:
        if line.startswith("## "):
            return
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def arguments_of(method: Any, body: dict[str, Any]) -> dict[str, Any]:
    """What the client knows by name, and the rest as its users send it: `extra_body`."""
    known = inspect.signature(method).parameters
    extra = {name: value for name, value in body.items() if name not in known}
    return {name: value for name, value in body.items() if name in known} | (
        {"extra_body": extra} if extra else {}
    )


# --- reading ----------------------------------------------------------------------------------------


def read(endpoint: str, pieces: list[Any]) -> Answer:
    """An answer from its objects: one, or those of a stream."""
    answer = Answer(raw=[piece.model_dump(mode="json") for piece in pieces])
    (read_response if endpoint == "responses" else read_choices)(answer)
    return answer


def read_choices(answer: Answer) -> None:
    open_calls: dict[int, list[str]] = {}
    for piece in answer.raw:
        if piece.get("usage"):
            answer.usage = piece["usage"]
            answer.num_usages += 1
        for choice in piece["choices"]:
            said = choice.get("message") or choice.get("delta") or {}
            answer.texts[choice["index"]] += choice.get("text") or said.get("content") or ""
            answer.reasons |= {choice["finish_reason"]} - {None}
            answer.token_ids += choice.get("token_ids") or ()
            found = choice.get("logprobs") or {}
            answer.logprobs += found.get("content") or found.get("tokens") or ()
            for i, call in enumerate(said.get("tool_calls") or ()):
                function = call["function"]
                if call.get("index", i) not in open_calls:
                    assert all((call["id"], call["type"], function["name"])), "what comes first"
                    open_calls[call.get("index", i)] = [function["name"], ""]
                open_calls[call.get("index", i)][1] += function["arguments"] or ""
    answer.calls = [(name, said) for name, said in open_calls.values()]


def read_response(answer: Answer) -> None:
    last = answer.raw[-1]
    response = last.get("response") or last
    answer.usage, answer.reasons = response["usage"], {response["status"]}
    answer.num_usages = 1
    for item in response["output"]:
        if item["type"] == "function_call":
            answer.calls.append((item["name"], item["arguments"]))
        for part in item.get("content") or ():
            answer.texts[0] += part.get("text") or ""
    deltas = "".join(each["delta"] for each in answer.raw if each.get("type") == "response.output_text.delta")
    assert not deltas or deltas == answer.text, "the deltas are the whole"


# --- asking -----------------------------------------------------------------------------------------


class Checks:
    """The checks of one server, and what came of them."""

    def __init__(self, model: str, *, is_peer: bool) -> None:
        self.model, self.is_peer = model, is_peer
        self.rows: list[tuple[str, str, str, str, str]] = []
        self._one = OpenAI(max_retries=0, timeout=120)
        self._several = AsyncOpenAI(max_retries=0, timeout=120)
        self._plain: dict[tuple[str, bool], Answer] = {}

    def _method(self, endpoint: str, client: Any) -> Any:
        return {
            "chat": client.chat.completions, "completions": client.completions, "responses": client.responses
        }[endpoint].create  # fmt: skip

    def ask(self, endpoint: str, body: dict[str, Any], *, streamed: bool) -> Answer:
        if streamed:
            body = body | {"stream": True}
            if endpoint != "responses":
                body = {"stream_options": {"include_usage": True}} | body
        method = self._method(endpoint, self._one)
        found = method(**arguments_of(method, body))
        return read(endpoint, list(found) if body.get("stream") else [found])

    async def ask_async(self, endpoint: str, body: dict[str, Any], *, streamed: bool) -> Answer:
        if streamed:
            body = body | {"stream": True}
            if endpoint != "responses":
                body = {"stream_options": {"include_usage": True}} | body
        method = self._method(endpoint, self._several)
        found = await method(**arguments_of(method, body))
        return read(endpoint, [piece async for piece in found] if body.get("stream") else [found])

    def judge(
        self, asked: Asked, found: Answer | Exception, plain: Answer, name: str, expected: str
    ) -> tuple[str, str]:
        """What came of one request: "passed", "refused" (by name), or "failed" and why."""
        if isinstance(found, APIStatusError):
            error = found.body if isinstance(found.body, dict) else {}
            named = name in str(error.get("param")) or name in str(error.get("message"))
            may = self.is_peer or expected == "refused" or name in BY_MODEL
            if found.status_code == 400 and named and may:
                return "refused", str(error.get("message"))[:80]
            return "failed", f"{found.status_code} {str(error.get('message') or found)[:100]}"
        if isinstance(found, Exception):
            return "failed", f"{type(found).__name__}: {found}"[:100]
        if expected == "refused" and not self.is_peer:
            return "failed", "the page says that it is refused"
        try:
            shown = bool(asked.effect(found, plain))
        except Exception as error:  # noqa: BLE001  # An answer of another form.
            return "failed", f"{type(error).__name__}: {error} in {found.text!r}"[:120]
        return (
            ("passed", "")
            if shown
            else ("failed", f"no effect: {found.text[:60]!r} {found.reasons} {found.usage}"[:140])
        )

    def parameters(self) -> None:
        """Each parameter, four ways."""
        for endpoint, title in SECTIONS.items():
            plain = {
                streamed: self.ask(endpoint, body_of(endpoint, self.model), streamed=streamed)
                for streamed in (False, True)
            }
            for cells in table_of(title):
                name = cells[0].strip("`")
                asked, expected = asked_of(endpoint, name), cells[1]
                body = request_of(endpoint, self.model, name, asked, plain[False])
                ways = [False] if asked.whole_only else [True] if asked.streamed_only else [False, True]
                for streamed in ways:
                    way = "streamed" if streamed else "whole"
                    one = self._caught(endpoint, body, streamed=streamed)
                    several = asyncio.run(self._all_caught(endpoint, body, streamed=streamed))
                    for how, found in (("sync", one), ("async", several)):
                        outcome = self.judge(
                            asked, found, plain[streamed], name, self._expected(endpoint, name, expected)
                        )
                        self.rows.append((endpoint, name, f"{how} {way}", *outcome))

    def _expected(self, endpoint: str, name: str, cell: str) -> str:
        """What the page says of our engine; of responses it may refer to chats."""
        if endpoint == "responses" and cell.startswith("as "):
            other = name if cell == "as in a chat" else ""
            cell = next(
                (cells[1] for cells in table_of(SECTIONS["chat"]) if cells[0] == f"`{other}`"), "honoured"
            )
        return cell

    def _caught(self, endpoint: str, body: dict[str, Any], *, streamed: bool) -> Answer | Exception:
        try:
            return self.ask(endpoint, body, streamed=streamed)
        except Exception as error:  # noqa: BLE001
            return error

    async def _all_caught(self, endpoint: str, body: dict[str, Any], *, streamed: bool) -> Answer | Exception:
        self._several = AsyncOpenAI(max_retries=0, timeout=120)  # Of this event loop.
        async with self._several:
            try:
                return await self.ask_async(endpoint, body, streamed=streamed)
            except Exception as error:  # noqa: BLE001
                return error

    def endpoints(self) -> None:
        """Each of the page's endpoints answers, or refuses with an error object."""
        stored = (
            self._one.responses.create(model=self.model, input="hi", max_output_tokens=2)
            if not self.is_peer
            else None
        )
        root = str(self._one.base_url).removesuffix("/v1/")
        for cells in table_of("## Endpoints"):
            verb, _, path = cells[0].strip("`").partition(" ")
            if verb == "POST" and path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
                continue  # By their parameters.
            if self.is_peer and not path.startswith("/v1/models"):
                continue
            ids = {
                "/v1/models": self.model,
                "/v1/responses": stored.id if stored else "",
                "/console": "console.js",
            }
            prefix = path.partition("/{")[0]
            path = re.sub(r"\{\w+\}", ids.get(prefix, "none"), path)
            content = {"tokens": [300]} if path.endswith("/detokenize") else {"prompt": "a b"}
            body = {"model": self.model, **content}
            headers = {"Authorization": f"Bearer {self._one.api_key}"}
            kwargs: dict[str, Any] = {} if verb == "GET" else {"json": body if verb == "POST" else None}
            if path == "/console/feed":
                continue  # It does not end.
            reported = httpx.request(verb, root + path, headers=headers, timeout=60, **kwargs)
            is_json = "json" in reported.headers.get("content-type", "")
            error = reported.json().get("error") if is_json and reported.status_code >= 400 else None
            well = reported.status_code < 400 or (error and error.get("message"))
            outcome = (
                "passed"
                if reported.status_code < 400
                else "refused"
                if well and reported.status_code < 500
                else "failed"
            )
            self.rows.append(
                (
                    cells[0].strip("`"),
                    "",
                    "",
                    outcome,
                    ""
                    if reported.status_code < 400
                    else f"{reported.status_code} {(error or {}).get('message', '')}"[:100],
                )
            )

    def show(self, *, failed_only: bool) -> bool:
        """The table; whether nothing failed."""
        for row in self.rows:
            if row[3] == "failed" or not failed_only:
                print(f"{row[0]:24} {row[1]:28} {row[2]:15} {row[3]:8} {row[4]}")
        counts = collections.Counter(row[3] for row in self.rows)
        print(
            f"{len(self.rows)} checks: {counts['passed']} passed, {counts['refused']} refused by name, "
            f"{counts['failed']} failed"
        )
        return not counts["failed"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="penstock-demo")
    parser.add_argument("--failed", action="store_true", help="show only what failed")
    parser.add_argument("--peer", action="store_true", help="another server: nothing is expected of it")
    args = parser.parse_args()
    checks = Checks(args.model, is_peer=args.peer)
    checks.endpoints()
    checks.parameters()
    sys.exit(0 if checks.show(failed_only=args.failed) or args.peer else 1)


if __name__ == "__main__":
    main()
