"""Exchanges that are over are told of together, and each whatever becomes of the others."""

import asyncio
import io
from types import SimpleNamespace
from typing import cast

from penstock.clock import SystemClock
from penstock.config.tree import LogConfig
from penstock.gateway.endings import Endings
from penstock.gateway.http.exchange import Ending, Exchange
from penstock.telemetry.log import Log


class Writes(io.StringIO):
    """Counts writes."""

    num = 0

    def write(self, text: str) -> int:
        self.num += 1
        return super().write(text)


def exchange(number: int, status: int = 200) -> Exchange:
    facts = {
        "method": "GET", "path": f"/{number}", "status": status, "started_ns": 0, "id": f"req-{number}",
        "ending": Ending.ANSWERED, "served": None, "trace": None, "error": None,
    }  # fmt: skip
    return cast(Exchange, SimpleNamespace(**facts))


def test_exchanges_whose_answers_are_sent_together_are_told_of_together_and_written_behind_them() -> None:
    codes, stream = list[int](), Writes()

    def http_response(status: int) -> None:
        assert status != 500, "a bug"
        codes.append(status)

    log = Log(LogConfig(), SystemClock(), stream=stream)
    answers = SimpleNamespace(is_sending=False, on_sent=None)
    services = SimpleNamespace(
        clock=SystemClock(), log=log, kept=None, metrics=SimpleNamespace(http_response=http_response),
        dispatcher=SimpleNamespace(answers=answers),
    )  # fmt: skip
    endings = Endings(services, None, None)  # pyright: ignore[reportArgumentType]

    async def turn() -> None:
        endings.take(exchange(0, 201))
        assert codes == [201], "by itself: at once"
        answers.is_sending = True
        for number, status in enumerate((200, 404, 500, 200), 1):  # Nobody counts the 500, which is logged.
            endings.take(exchange(number, status))
        assert codes == [201]
        answers.on_sent()
        assert codes == [201, 200, 404, 200]
        assert stream.num == 2, "the bug's, with the lines before it"
        await asyncio.sleep(0)
        assert stream.num == 3

    asyncio.run(turn())
    lines = stream.getvalue().splitlines()
    assert [line.split()[3] for line in lines if "duration_ms" in line] == ["/0", "/1", "/2", "/4"]
    assert sum("could not be counted" in line and "req-3" in line for line in lines) == 1
