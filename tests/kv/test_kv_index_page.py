"""The worked example of docs/kv-index.md runs as it stands."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "kv-index.md"


def test_the_example_holds() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(compile(example, str(PAGE), "exec"), {})  # noqa: S102
