"""A provider in a process of its own, which misbehaves as it is told: a stand-in, steered by a pipe.

Run as a script it serves until its standard input ends; each line there is a JSON object of `Faults` fields
(and `step_s`), answered with a line that counts the requests so far.
"""

import asyncio
import json
import subprocess
import sys
from typing import Any, Self

import engine_stand_ins

STAND_INS = {"openai": "OpenAIStandIn", "vllm": "VllmStandIn", "sglang": "SglangStandIn"}


class ProviderProcess:
    """One of them. `engine` is what it speaks, `rows` how many answers it gives at once (0: any)."""

    def __init__(self, engine: str = "openai", *, rows: int = 0) -> None:
        self.engine = engine
        self._process = subprocess.Popen(
            [sys.executable, __file__, engine, str(rows)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.url = self._read()["url"]

    def behaves(self, **faults: Any) -> int:
        """From now on it does this and no other mischief; returns how many requests it has had."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(faults) + "\n")
        self._process.stdin.flush()
        return self._read()["requests"]

    def fails(self, status: int, **headers: str) -> int:
        """It answers every request with this status."""
        body = json.dumps({"error": {"message": "so it was scripted", "type": "scripted"}})
        return self.behaves(status=[status, {"content-type": "application/json", **headers}, body])

    def kill(self) -> None:
        """As a machine that dies."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


async def _serve(engine: str, rows: int) -> None:
    stand_in = getattr(engine_stand_ins, STAND_INS[engine])(rows=rows)
    await stand_in.start()
    print(json.dumps({"url": stand_in.url}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        faults = json.loads(line)
        stand_in.faults.__init__()
        stand_in.step_s = faults.pop("step_s", 0.0)
        for name, value in faults.items():
            if name == "status":
                value = (value[0], value[1], value[2].encode())
            assert hasattr(stand_in.faults, name), name
            setattr(stand_in.faults, name, value)
        print(json.dumps({"requests": len(stand_in.requests)}), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
