"""The house rules as a test: imports point down, the deciding floor touches nothing outside, nothing is too
big.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "penstock"
PAGE = ROOT.parent / "docs" / "architecture.md"
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500
ASSERTS_PER_FUNCTION_MIN = 0.3
DECIDING = {"kv", "policy", "protocol", "schedule"}

# A package may import the packages to its right, and nothing else of ours.
ALLOWED = {
    "clock": "",
    "gc_tuning": "",
    "rng": "",
    "types": "",
    "errors": "",
    "weight_cache": "errors",
    "config": "weight_cache types errors",
    "kv": "types errors",
    "models": "errors config",
    "schedule": "kv clock types errors config",
    "policy": "schedule kv clock types errors config",
    "protocol": "types errors config",
    "text": "models errors",
    "telemetry": "policy protocol kv clock rng types errors config",
    "engine": "text planning schedule kv models protocol clock rng types errors config",
    "backends": "text telemetry protocol kv clock types errors config",
    "gateway": "fleet backends text telemetry policy protocol kv clock rng types errors config",
    "offline": "fleet backends engine text models protocol clock rng types errors config",
    "planning": "policy schedule models clock types errors config",
    "sim": "planning policy schedule kv clock gc_tuning rng types errors config",
    "fleet": "backends text telemetry policy protocol kv clock rng types errors config",
}  # cli and bench may import anything.
EDGE = {"cli", "bench", "__init__", "__main__"}
# The same inside a package: a room may import the places to its right. "." is the modules beside the places:
# what the places share, or what composes them.
ROOMS = {
    "kv": {".": "", "cache": ".", "index": "."},
    "models": {".": "", "families": ".", "registry": "families ."},
    "policy": {
        ".": "",
        "estimates": ".",
        "limits": ".",
        "resilience": ".",
        "rollout": ".",
        "capacity": ".",
        "queueing": "estimates .",
        "placement": "queueing estimates .",
        "admission": "queueing limits estimates .",
        "request": "queueing limits estimates .",
        "extras": "request placement queueing estimates .",
        "lifecycle": "extras request admission placement queueing resilience limits estimates .",
    },
    "backends": {
        ".": "",
        "engine": ".",
        "http": "http.dialects .",
        "http.dialects": ".",
    },
    "gateway": {
        "http": "",
        "shared": "",
        "models": "",
        "identity": "http",
        "relay": "http",
        "dispatch": "relay models shared http",
        "api": "dispatch relay identity models shared http",
        "cells": "api dispatch relay models http",
        ".": "cells api dispatch relay identity models shared http",
    },
    "sim": {
        ".": "",
        "traffic": ".",
        "world": "traffic .",
        "report": "traffic .",
        "scenarios": "report world traffic .",
    },
    "cli": {".": "", "wiring": ".", "commands": "wiring ."},
}
PURE = {"kv", "models", "planning", "policy", "schedule", "protocol"}
OUTSIDE = {
    "asyncio", "datetime", "httpx", "os", "random", "requests", "secrets", "socket",
    "subprocess", "threading", "time", "torch", "uuid", "uvloop",
}  # fmt: skip


@cache
def modules() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(path.read_text())) for path in sorted(ROOT.rglob("*.py")))


@cache
def import_nodes() -> tuple[tuple[Path, ast.Import | ast.ImportFrom], ...]:
    """Nested ones included."""
    kinds = (ast.Import, ast.ImportFrom)
    return tuple(
        (path, node) for path, tree in modules() for node in ast.walk(tree) if isinstance(node, kinds)
    )


@cache
def imports() -> tuple[tuple[str, str, str], ...]:
    """(where, our package, imported module) of every import, nested ones included."""
    return tuple(_imports())


def _imports() -> Iterator[tuple[str, str, str]]:
    for path, node in import_nodes():
        here = path.relative_to(ROOT)
        package = here.parts[0].removesuffix(".py")
        where = f"{here}:{node.lineno}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield where, package, alias.name
            continue
        assert node.level == 0, f"{where}: write imports in full"
        assert node.module is not None
        if node.module == "penstock":
            for alias in node.names:
                yield where, package, f"penstock.{alias.name}"
        else:
            yield where, package, node.module


def test_every_room_has_a_floor() -> None:
    places = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path, _ in modules()}
    assert places <= set(ALLOWED) | EDGE, f"give these a floor: {places - set(ALLOWED) - EDGE}"


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


def test_the_page_draws_these_arrows() -> None:
    """`docs/architecture.md` has one line per package, with its arrows to other packages behind the last
    `->`.
    """
    floors = PAGE.read_text().partition("## Five floors")[2].partition("ground")[0]
    ground = {"clock", "gc_tuning", "rng", "types", "errors", "config", "weight_cache"}
    drawn = dict(re.findall(r"^ {4}(?:\w+ +| {8})(\w+) {2,}\S.*?(?: {2,}-> (.*))?$", floors, re.MULTILINE))
    page = {package: set(arrows.split()) for package, arrows in drawn.items() if package not in EDGE}
    assert page == {
        name: set(allowed.split()) - ground for name, allowed in ALLOWED.items() if name not in ground
    }


def room_of(package: str, rest: str) -> str:
    """The room of `penstock.PACKAGE.REST`: the longest name that the package's places have."""
    return max((room for room in ROOMS[package] if f"{rest}.".startswith(f"{room}.")), key=len, default=".")


def test_imports_between_rooms_point_down() -> None:
    wrong = []
    for where, package, module in imports():
        top, _, rest = module.removeprefix("penstock.").partition(".")
        if top != package or package not in ROOMS:
            continue
        here = where.partition(".py")[0].replace("/", ".").removesuffix(".__init__")
        source, goal = room_of(package, here.partition(".")[2]), room_of(package, rest)
        if goal == source or goal in ROOMS[package][source].split():
            continue
        wrong.append(f"{where}: {package}.{source} may not import {module} of {goal}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_a_room() -> None:
    """A new folder of a package that has rooms gets its place in the order."""
    for package, places in ROOMS.items():
        for path in sorted((ROOT / package).rglob("__init__.py")):
            name = ".".join(path.parent.relative_to(ROOT / package).parts)
            assert not name or name in places, f"give {package}.{name} a place in ROOMS"


def test_no_imports_run_in_a_circle() -> None:
    """Nested imports included."""
    names = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path, _ in modules()}
    names = {name.removesuffix(".__init__") for name in names}
    arrows: dict[str, set[str]] = {name: set() for name in names}
    for path, node in import_nodes():
        here = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        if isinstance(node, ast.Import):
            arrows[here].update(alias.name for alias in node.names)
        elif node.module is not None:
            arrows[here].update(f"{node.module}.{alias.name}" for alias in node.names)
            arrows[here].add(node.module)
    # A package's own `__init__` runs before its modules: only modules are drawn. The root's names of the
    # library are imported when they are asked for (`test_the_package_itself_imports_nothing`).
    arrows["penstock"].clear()
    arrows = {here: (goals & names) - {here} for here, goals in arrows.items()}
    while leaves := {name for name, goals in arrows.items() if not goals}:
        arrows = {name: goals - leaves for name, goals in arrows.items() if name not in leaves}
    assert not arrows, f"in or above a circle: {sorted(arrows)}"


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


def test_the_deciding_floor_states_what_must_hold() -> None:
    """At least three assertions for ten functions: what a caller owes, what is conserved, what only grows."""
    functions = asserts = 0
    for path, tree in modules():
        if path.relative_to(ROOT).parts[0] in DECIDING:
            nodes = list(ast.walk(tree))
            functions += sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes)
            asserts += sum(isinstance(node, ast.Assert) for node in nodes)
    assert asserts >= ASSERTS_PER_FUNCTION_MIN * functions, f"{asserts} assertions in {functions} functions"
