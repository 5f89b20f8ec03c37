"""What stands in a documentation page: its configuration, its tables, its lines."""

import re
from pathlib import Path

import msgspec

from penstock.config.checks import check
from penstock.config.load import parse_config
from penstock.config.tree import Config, ModelConfig

DOCS = Path(__file__).parents[2] / "docs"


def text_of(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def configs(name: str, *models: str) -> list[Config]:
    """The page's YAML blocks, each read and checked; `models` are those that it takes for granted."""
    found = []
    for block in re.findall(r"```yaml\n(.*?)```", text_of(name), re.DOTALL):
        config = parse_config(block)
        assert isinstance(config, Config)
        if models:
            entries = tuple(ModelConfig(path="penstock-demo-mini", name=model) for model in models)
            config = msgspec.structs.replace(config, models=entries)
        check(config)
        found.append(config)
    assert found, f"docs/{name}.md has no configuration"
    return found


def table(name: str, first: str) -> list[list[str]]:
    """The rows under the table head whose first cells are `first`, cells without marks of emphasis."""
    lines = text_of(name).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith((f"| {first} |", f"{first} |")))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("*").replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def number(text: str) -> int:
    """1,234 as it is written in prose; "no limit" is 0."""
    return 0 if text == "no limit" else int(text.replace(",", ""))
