"""docs/cells.md as it stands: its configuration is accepted and says where the bound tenant's requests go,
its commands are commands, its scenarios are in the gate, and its metrics are in the catalogue.
"""

import re
import shlex

import msgspec
import pages

from bench.sim.gate import GATED
from penstock.cli.main import build_parser
from penstock.config.checks import check
from penstock.config.load import parse_config
from penstock.telemetry.catalog import CATALOG
from penstock.types import places_of

PAGE = pages.text_of("cells")


def test_its_configuration_binds_the_tenant_to_the_cells_that_it_says() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config = parse_config(block)
    (tenant,) = config.tenants
    for here, peers in (("east", ["north"]), ("west", ["east", "north"]), ("north", ["east"])):
        cells = msgspec.structs.replace(config.cells, here=here)
        check(msgspec.structs.replace(config, cells=cells))
        needs = places_of(tenant.residency)
        assert [cell.name for cell in cells.peers if needs <= cell.places] == peers
        assert (needs <= cells.places) == (here != "west"), "there its requests are never computed"


def test_its_commands_are_commands() -> None:
    lines = [
        shlex.split(line.partition("=east ")[2] or line, comments=True)
        for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
        for line in block.splitlines()
        if "penstock " in line
    ]
    assert [argv[:2] for argv in lines] == [["penstock", "serve"], ["penstock", "usage"]]
    for argv in lines:
        build_parser().parse_args(argv[1:])
    build_parser().parse_args(shlex.split("drain cell:west/river"))


def test_its_scenarios_are_in_the_gate_and_its_metrics_in_the_catalogue() -> None:
    assert {row[1] for row in pages.table("cells", "what | scenario")} <= set(GATED)
    named = set(re.findall(r"`(penstock_cell_[a-z_]+)", PAGE))
    assert len(named) == 3
    assert named <= {metric.name for metric in CATALOG}
