"""docs/autoscaling.md as it stands: its example is accepted and does as it says, its commands are commands,
and its table has the fields of the answer.
"""

import asyncio
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path

import pages
import pytest
from scaled_fleets import ScaledFleet

from penstock.cli.main import build_parser, main
from penstock.fleet.scale_report import ScaleAsk, ScaleOrder, ScaleReport

PAGE = pages.text_of("autoscaling")
EXAMPLE, ON_PODS = pages.configs("autoscaling")
(MODEL,) = EXAMPLE.models


def commands() -> list[list[str]]:
    found = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return [shlex.split(line, comments=True) for line in found[1].splitlines()]


def fleet_at(text: str, ledger: str = "") -> ScaledFleet:
    wall_s = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    return ScaledFleet({MODEL.name: MODEL.scale}, first=(MODEL.replicas,), wall_s=wall_s, ledger=ledger)


@pytest.mark.parametrize(
    ("when", "workers"),
    [
        ("2026-11-23 08:00", 3),  # A Monday: as the schedule says.
        ("2026-11-23 20:00", 2),  # Those of the start; one for the load and one on standby.
        ("2026-11-28 03:00", 2),  # A Saturday: frozen.
    ],
)
def test_the_example_has_as_many_workers_as_its_times_say(when: str, workers: int) -> None:
    async def check() -> None:
        fleet = fleet_at(when)
        await fleet.begin()
        report = await fleet.look()
        assert len(fleet.names()) == workers
        assert (report.min, report.max, report.standby) == (1, 6, 1)
        assert report.decision is not None
        assert report.decision.acts == ("28" not in when)

    asyncio.run(check())


def test_its_commands_are_commands_and_its_order_is_carried_out_and_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parsed = [build_parser().parse_args(argv[1:]) for argv in commands()]
    assert [each.model for each in parsed] == ["", "support", "support", ""]
    by_hand, again = parsed[2], commands()[3]

    async def check() -> None:
        fleet = fleet_at("2026-11-23 20:00", ledger=str(tmp_path))
        await fleet.begin()
        await fleet.look()
        asked = ScaleOrder(model=by_hand.model, workers=by_hand.to, for_s=by_hand.seconds)
        await fleet.leader.ask(ScaleAsk(order=asked, by="sk-1"))
        await fleet.settle()
        assert len(fleet.names()) == by_hand.to == 4
        fleet.make_ready(*fleet.names())
        await fleet.look(by_hand.seconds - 10)
        assert fleet.report().override is not None
        assert (await fleet.look(10)).override is None

    asyncio.run(check())
    *argv, name = again[1:]
    assert main([*argv, str(tmp_path / name)]) == 0
    assert "decisions made again: all the same" in capsys.readouterr().out


def test_the_table_has_every_field_of_the_answer() -> None:
    fields = [name for row in pages.table("autoscaling", "field") for name in row[0].split(", ")]
    assert sorted(fields) == sorted(ScaleReport.__struct_fields__)


def test_the_example_on_kubernetes_is_the_manifests() -> None:
    manifest = (pages.DOCS.parent / "examples" / "kubernetes" / "penstock.yaml").read_text()
    (model,) = ON_PODS.models
    (pool,) = model.scale.pools
    assert not model.scale.launches
    assert f"workload: {pool.workload}" in manifest
    assert f"max: {model.scale.max}\n" in manifest
