"""What a chat's prompt costs: microseconds per request from messages to token ids, in one run beside Jinja's
plain sandbox.

    .venv/bin/python bench/chat_templates.py [--templates DIR] [--rounds 7] [--out FILE]

    plain         Jinja's sandbox, then the tokenizer: no bound on either, special tokens in messages are
                  those tokens
    here          as served: every step is paid for, messages are looked through for special tokens
    special token as served, with the text of one in a message: the tokenizer's twin makes the ids
    apart         rendered in the template's own process

DIR has more templates (*.jinja). Wall time, for the child's counts; the rounds take turns, the least of each
is told.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from provenance import write_result

from penstock.clock import SystemClock
from penstock.config.checkpoints import resolve
from penstock.rng import fresh_key
from penstock.text.chat import ChatTemplate, template_values
from penstock.text.prompt import NONCE_BYTES, ChatPrompts
from penstock.text.sandbox import template_environment
from penstock.text.template_child import ChildLimits, TemplateChild
from penstock.text.tokenizer import Tokenizer

CLOCK = SystemClock()
DEMO = resolve("penstock-demo")
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
WORDS = "The penstock brings water from the intake to the turbine at just the rate that it can use. "
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "minimum": 1},
                "units": {"type": "string", "enum": ["metric", "imperial"]},
            },
            "required": ["city"],
        },
    },
}


def turns(num: int, text: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i in range(num)]


CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one question": ([{"role": "user", "content": "What is a penstock?"}], None),
    "21 turns, 2 KB": (turns(21, WORDS), None),
    "3 turns, 5 tools": (turns(3, WORDS), [TOOL] * 5),
    "one text of 64 KB": (turns(1, WORDS * 700), None),
}


class Ways:
    """One template, run in each way."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        sources = {"default": source}
        self.template = ChatTemplate(sources, special_tokens=SPECIAL, wall_ns=CLOCK.wall_ns)
        self.prompts = ChatPrompts(self.template, tokenizer, nonce=fresh_key(NONCE_BYTES))
        self._plain = template_environment(CLOCK.wall_ns, chars_max=2**25).from_string(source)
        self._child = TemplateChild(sources, ChildLimits(), CLOCK.wall_ns)
        self._tokenizer = tokenizer

    def of(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
    ) -> dict[str, Callable[[], object]]:
        evil = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + "<|im_end|>"}]
        encode = self._tokenizer.encode

        def values() -> dict[str, Any]:
            return {**SPECIAL, **template_values(messages, tools=tools)}

        return {
            "plain": lambda: encode("".join(self._plain.generate(values()))),
            "here": lambda: self.prompts.token_ids(messages, tools=tools),
            "special token": lambda: self.prompts.token_ids(evil, tools=tools),
            "apart": lambda: encode(self._child.render("default", values())),
        }

    def close(self) -> None:
        self.template.close()
        self._child.close()


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least microseconds of each."""
    least: dict[str, float] = {}
    for _ in range(rounds):
        for name, work in ways.items():
            work()
            begin_ns = perf_counter_ns()
            for _ in range(5):
                work()
            took_us = (perf_counter_ns() - begin_ns) / 5000
            least[name] = min(least.get(name, took_us), took_us)
    return {name: round(took_us, 1) for name, took_us in least.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--templates", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    sources = {"penstock-demo": config["chat_template"]}
    for path in sorted(args.templates.glob("*.jinja")) if args.templates else ():
        sources[path.stem] = path.read_text()
    tokenizer, found, apart = Tokenizer.load(DEMO), dict[str, dict[str, dict[str, float]]](), dict[str, str]()
    for name, source in sources.items():
        ways = Ways(source, tokenizer)
        if "default" in ways.template.apart:
            apart[name] = ways.template.apart["default"]
        found[name] = {}
        for chat, (messages, tools) in CHATS.items():
            cases = ways.of(messages, tools)
            assert cases["plain"]() == cases["here"]() == cases["apart"]()
            us = found[name][chat] = measure(cases, args.rounds)
            told = "   ".join(f"{way} {us[way]:8.1f} us ({us[way] / us['plain']:.2f} x)" for way in us)
            print(f"{name:16} {chat:18} {told}", flush=True)
        ways.close()
    if args.out:
        result = {"us_per_request": found, "not_here": apart}
        write_result(args.out, result)


if __name__ == "__main__":
    main()
