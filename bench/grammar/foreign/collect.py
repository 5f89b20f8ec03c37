"""Print the JSON schemas of installed packages, one JSON array `[package, name, schema]` a line.

Runs in an environment of its own, which has the packages of requirements.txt and nothing of ours.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

EACH_MAX = 25
"""Schemas of one package, evenly from all that it has."""
FILES = {
    "cfn-lint": ("cfnlint", "data/schemas/other/**/*.json"),
    "check-jsonschema": ("check_jsonschema", "builtin_schemas/vendor/*.json"),
    "cyclonedx-python-lib": ("cyclonedx", "schema/_res/*.json"),
    "jsonschema-specifications": ("jsonschema_specifications", "schemas/*/metaschema.json"),
    "kubernetes-validate": ("kubernetes_validate", "kubernetes-json-schema/*/*.json"),
    "nbformat": ("nbformat", "v*/*.schema.json"),
    "openapi-spec-validator": ("openapi_spec_validator", "resources/schemas/*/schema.json"),
    "validate-pyproject": ("validate_pyproject", "**/*.json"),
}
"""Of files: the package's module, and where in it."""
MODELS = {"openai": "openai.types", "anthropic": "anthropic.types", "mcp": "mcp.types"}
"""Of typed models: the module that has them."""


def evenly(found: Sequence[object]) -> Iterator[object]:
    step = max(1, len(found) // EACH_MAX)
    return iter(found[::step][:EACH_MAX])


def of_files(module: str, pattern: str) -> Iterator[tuple[str, object]]:
    spec = find_spec(module)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    folders = sorted({path.parent for path in root.glob(pattern)})
    if module == "kubernetes_validate":
        folders = folders[-1:]  # One release of many.
    files = sorted(path for path in root.glob(pattern) if path.parent in folders)
    for path in evenly([path for path in files if path.name[0] != "_"]):
        assert isinstance(path, Path)
        schema = json.loads(path.read_text())
        if isinstance(schema, dict) and {"$schema", "properties", "$ref", "definitions"} & schema.keys():
            yield str(path.relative_to(root)), bundled(schema, path.with_name("_definitions.json"))


def bundled(schema: dict[str, object], beside: Path) -> dict[str, object]:
    """The schema with the definitions of the file beside it that it uses, as a client has to send it."""
    if not beside.exists():
        return schema
    reference = re.compile(r'"[^"#]*#/(?:[$]defs|definitions)/([^"]+)"')
    file = json.loads(beside.read_text())
    known, used = file.get("$defs") or file["definitions"], dict[str, object]()
    todo = [json.dumps(schema)]
    while todo:
        for name in reference.findall(todo.pop()):
            if name not in used:
                used[name] = known[name]
                todo.append(json.dumps(known[name]))
    whole = {name: value for name, value in schema.items() if name != "$id"} | {"$defs": used}
    return json.loads(reference.sub(r'"#/$defs/\1"', json.dumps(whole)))


def of_models(module: str) -> Iterator[tuple[str, object]]:
    found = inspect.getmembers(importlib.import_module(module), inspect.isclass)
    models = [each for _, each in found if hasattr(each, "model_json_schema")]
    model: Any
    for model in evenly(models):
        try:
            yield model.__name__, model.model_json_schema()
        except Exception as error:  # noqa: BLE001 Some types have no schema.
            print(f"{module}.{model}: {error}", file=sys.stderr)


for package in sorted([*FILES, *MODELS]):
    schemas = of_files(*FILES[package]) if package in FILES else of_models(MODELS[package])
    for name, schema in schemas:
        print(json.dumps([f"{package} {version(package)}", name, schema]))
