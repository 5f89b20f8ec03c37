"""What `pip wheel .` makes serves where it is unpacked: in an empty directory, without a compiler, without a
checkout.

`make test-wheel` does the same with a real compiler and a new virtual environment, which takes minutes.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "penstock/engine/native/_kernels.so"
PATIENCE_S = 90.0
# What this checkout has compiled already, as the "compiler" of another build: the packaging is tested here,
# not g++.
COMPILER = f"""#!/bin/sh
case " $* " in *" -c "*) from=/dev/null;; *) from={BUILT};; esac
while [ "$1" != -o ]; do shift; done
cp $from $2
"""

pytestmark = pytest.mark.timeout(240)


def build(directory: Path, out: str, **environ: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", out, "."],
        cwd=directory, env={**os.environ, **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = (directory / out).glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, for a build leaves things behind."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(
        ROOT / "penstock", copy / "penstock", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    (copy / "models").symlink_to(ROOT / "models")
    return copy


@pytest.fixture(scope="module")
def native(sources: Path) -> Path:
    if not BUILT.exists():
        pytest.skip("no native kernels were built here")
    compiler = sources / "cxx"
    compiler.write_text(COMPILER)
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return build(sources, "native", CXX=str(compiler))


@pytest.fixture(scope="module")
def plain(sources: Path, request: pytest.FixtureRequest) -> Path:
    if BUILT.exists():
        request.getfixturevalue("native")  # First: what it leaves in `build/` must not get into this one.
    return build(sources, "plain", PENSTOCK_NO_NATIVE="1")


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def test_without_kernels_it_is_for_any_machine(plain: Path) -> None:
    assert re.fullmatch(r"penstock-[\d.]+-py3-none-any\.whl", plain.name)
    found = names(plain)
    assert not [name for name in found if name.endswith(".so")]
    for model in ("penstock-demo", "penstock-demo-mini"):
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            assert f"penstock/demo_models/{model}/{file}" in found
    static = [
        f"penstock/gateway/api/static/{name}"
        for name in ("index.html", "app.js", "app.css", "icon.svg", "runbook.md")
    ]
    assert {*static, "penstock/py.typed"} <= found
    assert not [name for name in found if ".data/" in name]


def test_with_kernels_it_is_for_any_python(native: Path, plain: Path) -> None:
    assert re.fullmatch(r"penstock-[\d.]+-py3-none-linux_x86_64\.whl", native.name)
    here = {name for name in names(native) if ".dist-info/" not in name}
    assert here - names(plain) == {"penstock/engine/native/_kernels.so"}


def test_extras(plain: Path) -> None:
    with zipfile.ZipFile(plain) as opened:
        (path,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        lines = opened.read(path).decode().splitlines()
    (of_all,) = (line for line in lines if line.endswith('extra == "all"'))
    for extra in ("dns", "engine", "events", "hub", "jwt", "parquet", "ray", "redis"):
        assert f"Provides-Extra: {extra}" in lines
        assert extra in of_all


@pytest.fixture(scope="module")
def unpacked(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `penstock` is what the wheel holds."""
    place = tmp_path_factory.mktemp("site")
    wheel = plain
    if BUILT.exists():
        (wheel,) = (plain.parents[1] / "native").glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(place)
    known = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    nothing = str(tmp_path_factory.mktemp("bin"))
    return {**known, "PYTHONPATH": str(place), "PATH": nothing, "PENSTOCK_STATE_DIR": nothing}


def test_the_bare_command_answers(unpacked: dict[str, str], tmp_path: Path) -> None:
    with serving(unpacked, tmp_path) as (url, key, shown):
        body = {"model": "penstock-demo", "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(body).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert "42" in json.loads(answer.read())["choices"][0]["message"]["content"]
        assert "computing with torch" not in shown() or not BUILT.exists()


def test_doctor_looks_at_what_the_bare_command_needs(unpacked: dict[str, str], tmp_path: Path) -> None:
    models = Path(unpacked["PYTHONPATH"], "penstock/demo_models")
    models.rename(models.with_name("elsewhere"))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "doctor", "--json"],
            cwd=tmp_path, env=unpacked, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        models.with_name("elsewhere").rename(models)
    document = json.loads(done.stdout)
    assert (done.returncode, document["can_serve"]) == (1, False)
    (check,) = (check for check in document["checks"] if check["state"] == "fail")
    assert check["name"] == "demo models"
    assert check["detail"].endswith("name a model: penstock serve DIRECTORY")


@contextlib.contextmanager
def serving(environment: dict[str, str], directory: Path) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """`penstock serve` without a word more, on a free port: its URL, its key, and what it has printed so
    far.
    """
    out = directory / "out"
    with out.open("w") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "penstock", "serve"],
            cwd=directory, stdout=stream, stderr=subprocess.STDOUT, env={**environment, "PENSTOCK_PORT": "0"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "Ctrl-C drains" not in out.read_text():
            assert server.poll() is None, out.read_text()
            assert time.monotonic() < deadline, out.read_text()
            time.sleep(0.02)
        url, key = re.search(r"API +(\S+)", out.read_text()), re.search(r"key +(\S+)", out.read_text())
        assert url
        assert key
        yield url[1], key[1], out.read_text
    finally:
        server.send_signal(signal.SIGINT)  # Behind SIGTERM it would listen on for a lameduck time.
        assert server.wait(PATIENCE_S) == 0
