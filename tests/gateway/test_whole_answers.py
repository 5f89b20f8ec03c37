"""Whole answers of one turn of the loop: first their records, then all of them, then what waits behind."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.gateway.dispatch.whole_answers import WholeAnswers
from penstock.gateway.relay.reply import Reply


class Played:
    """What happened, in its order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.answers = WholeAnswers(self.flush, lambda reply, error: self.bug(error))
        self.flush_fails = False

    def flush(self) -> None:
        if self.flush_fails:
            raise ValueError("flush")
        self.seen.append("flush")

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
def played() -> Played:
    return Played()


def test_answers_come_behind_their_records_and_before_what_waits(played: Played) -> None:
    async def turns() -> None:
        played.call("before")
        played.answers.add(played.reply("a"))
        played.call("behind")
        played.answers.add(played.reply("b"))
        assert not played.seen, "the records of other answers may follow in this turn"
        await asyncio.sleep(0)
        assert played.seen == ["before", "flush", "a", "b"]
        assert not played.answers
        await asyncio.sleep(0)
        assert played.seen[4:] == ["behind"]

    asyncio.run(turns())


def test_one_answer_that_fails_leaves_the_others(played: Played) -> None:
    async def turns() -> None:
        played.answers.on_sent = lambda: played.seen.append("sent")
        played.answers.add(played.reply("a", fails=True))
        played.answers.add(played.reply("b"))
        await asyncio.sleep(0)
        assert played.seen == ["flush", "bug a", "cut a", "b", "sent"]
        assert not played.answers.is_sending

    asyncio.run(turns())


def test_no_answer_goes_out_without_its_record_and_the_next_ones_go_on(played: Played) -> None:
    async def turns() -> None:
        played.answers.on_sent = lambda: played.seen.append("sent")
        played.flush_fails = True
        for name in "ab":
            played.answers.add(played.reply(name))
        played.call("behind")
        await asyncio.sleep(0)
        assert played.seen == ["bug flush", "cut a", "bug flush", "cut b", "sent"]
        await asyncio.sleep(0)
        assert played.seen[5:] == ["behind"]
        played.flush_fails = False
        played.answers.add(played.reply("c"))
        await asyncio.sleep(0)
        assert played.seen[6:] == ["flush", "c", "sent"]

    asyncio.run(turns())


def test_without_answers_nothing_waits_longer(played: Played) -> None:
    async def turns() -> None:
        played.call("now")
        await asyncio.sleep(0)
        assert played.seen == ["now"]

    asyncio.run(turns())
