"""The house rules as a test: imports point down, the deciding floor touches nothing outside, nothing is too big."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "penstock"
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500

# A package may import the packages to its right, and nothing else of ours.
ALLOWED = {
    "clock": "",
    "collector": "",
    "rng": "",
    "types": "",
    "errors": "types",
    "config": "types errors",
    "kv": "types errors config",
    "models": "types errors config",
    "schedule": "kv clock types errors config",
    "policy": "schedule kv clock types errors config",
    "protocol": "types errors config",
    "text": "types errors config",
    "telemetry": "policy clock types errors config",
    "engine": "text telemetry schedule kv models protocol clock rng types errors config",
    "backends": "engine text telemetry protocol kv clock types errors config",
    "gateway": "fleet backends text telemetry policy protocol kv clock rng types errors config",
    "planning": "policy schedule models clock types errors config",
    "sim": "planning policy schedule kv protocol telemetry clock collector rng types errors config",
    "fleet": "backends text telemetry policy protocol kv clock rng types errors config",
}  # cli and bench may import anything.
EDGE = {"cli", "bench", "__init__", "__main__"}
PURE = {"kv", "models", "planning", "policy", "schedule", "protocol"}
OUTSIDE = {
    "asyncio", "datetime", "httpx", "os", "random", "requests", "secrets", "socket",
    "subprocess", "threading", "time", "torch", "uuid", "uvloop",
}  # fmt: skip


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def imports() -> Iterator[tuple[str, str, str]]:
    """Yield (where, our package, imported module) for every import, nested ones included."""
    for path, tree in modules():
        here = path.relative_to(ROOT)
        package = here.parts[0].removesuffix(".py")
        for node in ast.walk(tree):
            where = f"{here}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield where, package, alias.name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{where}: write imports in full"
                assert node.module is not None
                if node.module == "penstock":
                    for alias in node.names:
                        yield where, package, f"penstock.{alias.name}"
                else:
                    yield where, package, node.module


def test_every_room_has_a_floor() -> None:
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path, _ in modules()}
    assert rooms <= set(ALLOWED) | EDGE, f"give these a floor: {rooms - set(ALLOWED) - EDGE}"


def test_imports_point_down() -> None:
    wrong = []
    for where, package, module in imports():
        top, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if top != "penstock" or package not in ALLOWED or target in (package, "__version__"):
            continue
        if target not in ALLOWED[package].split():
            wrong.append(f"{where}: {package} may not import {target}")
    assert not wrong, "\n".join(wrong)


def test_pure_packages_touch_nothing_outside() -> None:
    wrong = [
        f"{where}: {package} may not import {module}"
        for where, package, module in imports()
        if package in PURE and module.split(".")[0] in OUTSIDE
    ]
    assert not wrong, "\n".join(wrong)


def test_the_gateway_needs_no_torch() -> None:
    """Torch is an extra: only the engine may import it, and only the engine's process loads it."""
    wrong = [
        f"{where}: {package} may not import {module}"
        for where, package, module in imports()
        if package not in EDGE | {"engine"} and module.split(".")[0] in {"torch", "numpy", "safetensors"}
    ]
    assert not wrong, "\n".join(wrong)


def test_functions_and_files_stay_small() -> None:
    wrong = []
    for path, tree in modules():
        here = path.relative_to(ROOT)
        lines = len(path.read_text().splitlines())
        if lines > FILE_LINES_MAX:
            wrong.append(f"{here}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                size = node.end_lineno - node.lineno + 1
                if size > FUNCTION_LINES_MAX:
                    wrong.append(f"{here}:{node.lineno}: {node.name} has {size} lines")
    assert not wrong, "\n".join(wrong)
