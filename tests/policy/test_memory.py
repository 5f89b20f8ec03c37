"""Which models sleep so that another one fits."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.policy.placement.memory import MakeRoom, ModelMemory, NoRoom, room_for, taken_bytes


def model(name: str, awake_bytes: int, *, used: int | None = None, busy: bool = False) -> ModelMemory:
    """`used`: when it last had work; None: it is asleep."""
    return ModelMemory(
        name=name,
        awake=used is not None or busy,
        awake_bytes=awake_bytes,
        asleep_bytes=1,
        used_ns=used or 0,
        is_idle=used is not None and not busy,
    )


def test_what_fits_costs_nobody_his_place() -> None:
    assert room_for("a", [model("a", 5), model("b", 5, used=1)], 10) == MakeRoom()


def test_the_one_that_was_used_longest_ago_makes_room() -> None:
    models = [model("a", 5), model("b", 5, used=2), model("c", 5, used=1), model("d", 5, used=3)]
    assert room_for("a", models, 16) == MakeRoom(("c",))
    assert room_for("a", models, 15) == MakeRoom(("c", "b"))


def test_no_more_sleep_than_are_needed() -> None:
    """The small ones that were used before the large one would not have been enough."""
    models = [model("a", 10), model("b", 3, used=1), model("c", 20, used=2)]
    assert room_for("a", models, 15) == MakeRoom(("c",))


def test_work_keeps_its_place() -> None:
    models = [model("a", 5), model("b", 5, used=1, busy=True), model("c", 5, used=2)]
    assert room_for("a", models, 11) == MakeRoom(("c",))
    assert room_for("a", models, 10) == NoRoom(1, ("b",))


def test_what_is_too_large_for_the_bound_waits_for_nobody() -> None:
    assert room_for("a", [model("a", 10), model("b", 5, used=1, busy=True)], 8) == NoRoom(7)


MODELS = st.lists(
    st.builds(
        ModelMemory,
        name=st.just(""),
        awake=st.booleans(),
        awake_bytes=st.integers(5, 30),
        asleep_bytes=st.integers(0, 5),
        used_ns=st.integers(0, 9),
        is_idle=st.booleans(),
    ),
    min_size=1,
    max_size=7,
)


@given(MODELS, st.integers(0, 90))
def test_the_bound_is_kept_with_as_few_asleep_as_that_takes(found: list[ModelMemory], bound: int) -> None:
    models = [
        ModelMemory(
            name=str(i),
            awake=each.awake and i > 0,
            awake_bytes=each.awake_bytes,
            asleep_bytes=each.asleep_bytes,
            used_ns=each.used_ns,
            is_idle=each.is_idle and each.awake and i > 0,
        )
        for i, each in enumerate(found)
    ]

    def after(asleep: set[str]) -> int:
        rest = [each for each in models[1:] if each.name not in asleep]
        slept = sum(each.asleep_bytes for each in models if each.name in asleep)
        return models[0].awake_bytes + taken_bytes(rest) + slept

    idle = {each.name for each in models if each.is_idle}
    answer = room_for("0", models, bound)
    if isinstance(answer, NoRoom):
        assert after(idle) - bound == answer.missing_bytes > 0
        return
    asleep = set(answer.sleep)
    assert asleep <= idle
    assert after(asleep) <= bound
    assert all(after(asleep - {each}) > bound for each in asleep), "each is needed"
