import io
import platform
import shlex
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from penstock.cli.wiring.serving import BannerFacts, advice, curl_line, python_snippet, show
from penstock.engine.native import presence

FACTS = BannerFacts(
    url="http://127.0.0.1:8000/v1", models=("penstock-demo", "b"), key="sk-new", needs_key=True, ready_s=2.345
)


def shown(facts: BannerFacts) -> str:
    console = Console(file=io.StringIO(), width=60)
    show(console, facts)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_new_key_is_shown_and_used() -> None:
    text = shown(FACTS)
    assert "ready after 2.3 s" in text
    assert "key        sk-new" in text
    assert "console    http://127.0.0.1:8000/console\n" in text
    assert curl_line(FACTS) in text.splitlines()  # Not wrapped, however narrow the terminal.


def test_a_configured_key_is_not_shown() -> None:
    text = shown(replace(FACTS, key=""))
    assert "as configured" in text
    assert 'Bearer $PENSTOCK_API_KEY"' in text
    assert 'os.environ["PENSTOCK_API_KEY"]' in text


def test_the_curl_line_is_one_shell_command() -> None:
    words = shlex.split(curl_line(FACTS))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer sk-new" in words
    body = msgspec.json.decode(words[words.index("-d") + 1])
    assert (body["model"], body["stream"]) == ("penstock-demo", True)


def test_the_snippet_is_python() -> None:
    for facts in (FACTS, replace(FACTS, key=""), replace(FACTS, key="", needs_key=False)):
        compile(python_snippet(facts), "snippet", "exec")


def test_no_key_no_header() -> None:
    facts = replace(FACTS, key="", needs_key=False)
    assert "Authorization" not in curl_line(facts)
    assert "none is needed" in shown(facts)


def test_an_open_address_is_pointed_out() -> None:
    assert "listens on 0.0.0.0" in shown(replace(FACTS, open_to="0.0.0.0"))


def test_the_kernels_are_named_and_what_gives_better_ones() -> None:
    kernels = ("native avx2", "torch 2.13.0 AVX2 x86_64")
    text = shown(replace(FACTS, kernels=kernels, advice="torch is slow; for those: do this"))
    assert "  kernels    native avx2, torch 2.13.0 AVX2 x86_64\n" in text
    assert "             torch is slow; for those: do this\n" in text
    assert "kernels" not in shown(FACTS)


def test_a_slow_python_is_named() -> None:
    assert f"  Python     {platform.python_version()}, built slow\n" in shown(
        replace(FACTS, python="built slow")
    )
    assert "  Python  " not in shown(FACTS)


def test_a_clone_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NATIVE_ISA", "no-such-set")  # As if the library could not be used.
    assert advice(["native avx2"]) == ""
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(presence.shutil, "which", lambda _name: None)
    said = advice(["torch 2.13.0 AVX2 x86_64"])
    assert said.endswith("sudo apt-get install g++ && python -m penstock.engine.native.build")
    assert "slower" in said
    monkeypatch.setattr(presence.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert advice(["torch 2"]).endswith(": python -m penstock.engine.native.build")


def test_a_model_that_only_torch_can_compute_is_told_no_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "kernels_here", lambda: presence.KernelsHere("avx2"))
    monkeypatch.setattr("penstock.cli.wiring.serving.kernels_here", presence.kernels_here)
    assert advice(["torch 2"]) == f"torch is {presence.TORCH_COST}"
