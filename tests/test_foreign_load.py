"""The measure of others' load that `tests/cli/test_overload.py` judges by, on a /proc of our own making."""

from pathlib import Path

from foreign_load import ForeignLoad, foreign_ticks

OWN, CHILD, OTHER = 10, 11, 12


def machine(proc: Path, *, user: int, interrupts: int = 0) -> None:
    """Two processors; the second one is not ours."""
    line = f"{user} 10 20 900 5 {interrupts} {interrupts} 30 0 0"
    (proc / "stat").write_text(f"cpu  {line}\ncpu0 {line}\ncpu1 {line}\nintr 1 2\n")


def process(proc: Path, pid: int, parent: int, *ticks: int) -> None:
    """Its own ticks in user and system, and those of its children that were waited for."""
    (proc / str(pid)).mkdir(exist_ok=True)
    middle = b"%d 0 0 0 0 0 0 0 0 0" % parent
    counted = b" ".join(b"%d" % each for each in ticks)
    (proc / str(pid) / "stat").write_bytes(b"%d (a) \xff) S %s %s 20 0 1\n" % (pid, middle, counted))


def test_what_others_do_is_what_is_left_of_the_processors_in_use(tmp_path: Path) -> None:
    machine(tmp_path, user=500)
    process(tmp_path, OWN, 1, 20, 5, 0, 0)
    process(tmp_path, CHILD, OWN, 30, 5, 7, 1)
    process(tmp_path, OTHER, 1, 300, 40, 0, 0)
    before = foreign_ticks(tmp_path, {0}, OWN)
    assert before == 500 + 10 + 20 + 30 - 25 - 43

    # The child has computed and ended; connections made interrupts.
    machine(tmp_path, user=600, interrupts=1000)
    (tmp_path / str(CHILD) / "stat").unlink()
    process(tmp_path, OWN, 1, 20, 5, 130, 13)
    assert foreign_ticks(tmp_path, {0}, OWN) == before

    machine(tmp_path, user=650)
    assert foreign_ticks(tmp_path, {0}, OWN) == before + 50


def test_a_slowdown_is_at_least_one() -> None:
    assert ForeignLoad().slowdown() >= 1
