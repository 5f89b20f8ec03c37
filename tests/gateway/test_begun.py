"""What begins where it is made goes on as a task would."""

import asyncio
from collections.abc import Callable, Coroutine

from penstock.gateway.http.begun import Begun, in_task

Work = Callable[[], Coroutine[object, object, None]]


def run(*works: Work, during: Callable[[Begun], None] = lambda begun: None) -> list[asyncio.Task[None]]:
    """Begin these where no task runs, do something, and let all come to their ends: the tasks that there
    were.
    """
    found: list[asyncio.Task[None]] = []

    async def main() -> None:
        begun, done = Begun(), asyncio.get_running_loop().create_future()

        def start() -> None:
            for work in works:
                begun.begin(work())
            found.extend(begun.tasks)
            during(begun)
            done.set_result(None)

        asyncio.get_running_loop().call_soon(start)
        await done
        if found:
            await asyncio.wait(found)
        await asyncio.to_thread(int)  # Longer than a turn of the loop.
        assert not begun.tasks

    asyncio.run(main())
    return found


def test_what_never_waits_is_over_at_once_and_has_no_task() -> None:
    seen: list[object] = []

    async def work() -> None:
        seen.append(asyncio.current_task())

    assert run(work, during=lambda begun: seen.append(set(begun.tasks))) == []
    assert seen == [None, set()]


def test_what_waits_goes_on_in_a_task_with_what_it_waited_for() -> None:
    seen: list[object] = []

    async def fails() -> None:
        await asyncio.to_thread(int)
        raise ValueError("failed")

    async def work() -> None:
        done = asyncio.get_running_loop().create_future()
        done.set_result("done already")
        seen.append(await done)
        seen.append(await asyncio.to_thread(int, "7"))
        try:
            await asyncio.ensure_future(fails())
        except ValueError as error:
            seen.append(str(error))
        async with asyncio.timeout(30):
            await asyncio.to_thread(int)
        seen.append("over")

    (task,) = run(work)
    assert task.exception() is None
    assert seen == ["done already", 7, "failed", "over"]


def test_in_task_leads_into_a_task() -> None:
    seen: list[object] = []

    async def work() -> None:
        await in_task()
        seen.append(asyncio.current_task())
        await in_task()
        async with asyncio.timeout(30):
            await asyncio.to_thread(int)
            seen.append(asyncio.current_task())

    (task,) = run(work)
    assert seen == [task, task]


def test_a_cancelled_one_cleans_up() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            seen.append("cleaned")

    def cancel(begun: Begun) -> None:
        loop = asyncio.get_running_loop()
        for task in begun.tasks:
            loop.call_soon(loop.call_soon, task.cancel)

    (task,) = run(work, during=cancel)
    assert task.cancelled()
    assert seen == ["cleaned"]


def test_one_that_is_cancelled_at_once_cleans_up() -> None:
    seen: list[object] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except BaseException as error:
            seen.append(type(error))
            raise
        finally:
            seen.append("cleaned")

    def cancel(begun: Begun) -> None:
        for task in begun.tasks:
            task.cancel()

    (task,) = run(work, during=cancel)
    assert task.cancelled()
    assert seen == [GeneratorExit, "cleaned"]


def test_an_error_is_the_tasks() -> None:
    async def work() -> None:
        await in_task()
        raise LookupError

    (task,) = run(work)
    assert isinstance(task.exception(), LookupError)
