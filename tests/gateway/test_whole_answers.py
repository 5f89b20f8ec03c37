"""Whole answers of one turn of the loop: first their records, then all of them, then what waits behind."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.gateway.dispatch.whole_answers import WholeAnswers
from penstock.gateway.relay.reply import Reply


class Told:
    """What happened, in its order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.answers = WholeAnswers(lambda: self.seen.append("flush"), lambda reply, error: self.bug(error))

    def bug(self, error: Exception) -> None:
        self.seen.append(f"bug {error}")

    def reply(self, name: str, *, fails: bool = False) -> Reply:
        def complete() -> None:
            if fails:
                raise ValueError(name)
            self.seen.append(name)

        exchange = SimpleNamespace(cut=lambda: self.seen.append(f"cut {name}"))
        return cast(Reply, SimpleNamespace(complete=complete, exchange=exchange))

    def call(self, name: str) -> None:
        self.answers.soon(lambda: self.seen.append(name))


@pytest.fixture
def told() -> Told:
    return Told()


def test_answers_come_behind_their_records_and_before_what_waits(told: Told) -> None:
    async def turns() -> None:
        told.call("before")
        told.answers.add(told.reply("a"))
        told.call("behind")
        told.answers.add(told.reply("b"))
        assert not told.seen, "the records of other answers may follow in this turn"
        await asyncio.sleep(0)
        assert told.seen == ["before", "flush", "a", "b"]
        assert not told.answers
        await asyncio.sleep(0)
        assert told.seen[4:] == ["behind"]

    asyncio.run(turns())


def test_one_answer_that_fails_leaves_the_others(told: Told) -> None:
    async def turns() -> None:
        told.answers.on_sent = lambda: told.seen.append("sent")
        told.answers.add(told.reply("a", fails=True))
        told.answers.add(told.reply("b"))
        await asyncio.sleep(0)
        assert told.seen == ["flush", "bug a", "cut a", "b", "sent"]
        assert not told.answers.is_sending

    asyncio.run(turns())


def test_without_answers_nothing_waits_longer(told: Told) -> None:
    async def turns() -> None:
        told.call("now")
        await asyncio.sleep(0)
        assert told.seen == ["now"]

    asyncio.run(turns())
