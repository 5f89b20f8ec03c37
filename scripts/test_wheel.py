"""Build the wheel, install it with its engine into a new virtual environment, and ask the bare
`penstock serve` a question there.

The directory is empty and no compiler is on the path. Says how long each part took; 0 if the answer was
right. The settings of pip on this machine (indexes, mirrors, constraints) count here as well.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from time import monotonic, sleep

ROOT = Path(__file__).parents[1]
PATIENCE_S = 120.0
QUESTION, ANSWER = "What is 12 + 30?", "42"


def main() -> int:
    """Carry it out."""
    with tempfile.TemporaryDirectory(prefix="penstock-wheel-") as name:
        place = Path(name)
        wheel = build(place)
        print(f"  {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
        bin_ = install(place, wheel)
        return serve_and_ask(place, bin_)


def timed(what: str, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; what it said is shown if it failed."""
    began = monotonic()
    done = subprocess.run(command, text=True, capture_output=True, check=False, **options)
    print(f"{what}: {monotonic() - began:.1f} s", flush=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done


def build(place: Path) -> Path:
    """As anyone would."""
    pip = [sys.executable, "-m", "pip"]
    timed("pip wheel .", [*pip, "wheel", "--no-deps", "-q", "-w", str(place / "dist"), "."], cwd=ROOT)
    (wheel,) = (place / "dist").glob("*.whl")
    return wheel


def install(place: Path, wheel: Path) -> Path:
    """Into an environment of its own, with the versions of constraints.txt."""
    venv.create(place / "venv", with_pip=True)
    bin_ = place / "venv" / "bin"
    pip = [str(bin_ / "python"), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    timed("pip install ./penstock-*.whl[engine]", [*pip, f"{wheel}[engine]"], cwd=place)
    return bin_


def serve_and_ask(place: Path, bin_: Path) -> int:
    """`penstock doctor`, then `penstock serve` and `penstock chat`, with nothing but Python to be found."""
    empty = place / "empty"
    empty.mkdir()
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    environ = {**kept, "PATH": str(bin_), "PENSTOCK_STATE_DIR": str(place / "state"), "PENSTOCK_PORT": "0"}
    done = timed("penstock doctor", [str(bin_ / "penstock"), "doctor"], cwd=empty, env=environ)
    print("  " + "\n  ".join(line for line in done.stdout.splitlines() if "native" in line or "demo" in line))
    out, began = place / "out", monotonic()
    with out.open("w") as stream:
        server = subprocess.Popen(
            [str(bin_ / "penstock"), "serve"], cwd=empty, env=environ, stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        while (
            found := re.search(r"API +(\S+)[\s\S]*key +(\S+)[\s\S]*Ctrl-C drains", out.read_text())
        ) is None:
            if server.poll() is not None or monotonic() - began > PATIENCE_S:
                sys.exit(out.read_text())
            sleep(0.05)
        print(f"penstock serve, until ready: {monotonic() - began:.1f} s")
        chat = [str(bin_ / "penstock"), "chat", "--url", found[1], "--key", found[2], QUESTION]
        answer = timed("penstock chat", chat, cwd=empty, env=environ).stdout.strip()
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
    print(f"  {QUESTION} {answer}")
    return 0 if ANSWER in answer else 1


if __name__ == "__main__":
    sys.exit(main())
