"""Which directory or GGUF file a model argument means: a built-in demo model, a path, a hub id or `s3://`;
and what lies there that holds no model.

Looks at names, at `config.json` and at the first bytes of a file, never at weights. `models/registry.py` says
whether the engine reads the weights of one that passes.
"""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from penstock.config.tree import ModelConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.weight_cache.fetch import fetched_from_hub, fetched_from_s3
from penstock.weight_cache.source import SourceError

GGUF_MAGIC = b"GGUF"
JSON_BYTES_MAX = 16 * 1024 * 1024
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_NO_WEIGHTS = ("consolidated", "adapter_")
"""How the names of safetensors files begin that hold a model in another layout, or no model."""
BY_VLLM = "or let a vLLM worker serve it (`workers`, docs/backends.md)"
GGUF_SUFFIX = ".gguf"
S3 = "s3://"
_SPLIT = re.compile(r"-(\d{5})-of-\d{5}$")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_NAMES_SHOWN = 8


def check_is_gguf(path: Path) -> None:
    """Refuse a file that is not GGUF, the only kind of model that is one file.

    Raises:
        ConfigError: its first bytes are not those of a GGUF file.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if begins != GGUF_MAGIC:
        raise ConfigError(f"{path}: is a file, but not GGUF; give that or the Hugging Face model directory")


def gguf_in(directory: Path) -> Path | None:
    """The GGUF model of a directory without other weights; of one that was split, its first file.

    Raises:
        CheckpointError: there are several.
    """
    is_model = (directory / "config.json").is_file() and weight_files(directory)
    if is_model or any((directory / name).is_file() for name in WEIGHTS):
        return None
    found = sorted(path.name for path in directory.glob("*") if path.name.lower().endswith(GGUF_SUFFIX))
    firsts: list[str] = []
    for name in found:
        part = _SPLIT.search(name[: -len(GGUF_SUFFIX)])
        # The vision part of a model is in the same directory, under this name.
        if not name.lower().startswith("mmproj") and (part is None or int(part[1]) == 1):
            firsts.append(name)
    if len(firsts) > 1:
        names = ", ".join(firsts[:_NAMES_SHOWN])
        raise CheckpointError(f"{directory}: holds {len(firsts)} GGUF models: give one of them: {names}")
    return directory / firsts[0] if firsts else None


def path_of(path: Path) -> Path:
    """The directory, or the GGUF file in it, that a path means; links to directories are followed.

    Raises:
        ConfigError: it is a file of another kind.
        CheckpointError: it is a directory without a model.
    """
    if path.is_file():
        check_is_gguf(path)
        # In a hub's snapshot the file itself is a link to a name that says nothing.
        return path.parent.resolve() / path.name
    if (gguf := gguf_in(path)) is not None:
        return path_of(gguf)
    check_is_model(path)
    return path.resolve()


def check_is_model(directory: Path) -> None:
    """Refuse a directory that holds something else than a Hugging Face model.

    Raises:
        CheckpointError: it has no `config.json`; the message says what it has.
    """
    if (directory / "adapter_config.json").is_file() and not weight_files(directory):
        base = str(
            json_object(directory / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        )
        raise CheckpointError(
            f"{directory}: is an adapter (LoRA) of {base[:128]}, not a whole model: merge it into that "
            f"(peft: merge_and_unload, save_pretrained), {BY_VLLM}"
        )
    if (directory / "config.json").is_file():
        return
    if (directory / "params.json").is_file() and first_match(directory, "consolidated*"):
        raise CheckpointError(
            f"{directory}: is in the layout of Meta's and Mistral's own tools (params.json); give the "
            f"directory of the same model "
            "in Hugging Face's (config.json, *.safetensors)"
        )
    raise CheckpointError(
        f"{directory}: no config.json and no {GGUF_SUFFIX} file there, so not a model directory"
    )


def weight_files(directory: Path) -> list[str]:
    """The names of a directory's weights: its index or its one file, by their usual names; else all parts of
    one model, or the only safetensors file that there is (AutoGPTQ's `gptq_model-4bit-128g`). Empty: there
    are none, or it cannot be told which.
    """
    for name in reversed(WEIGHTS):
        if (directory / name).is_file():
            return [name]
    names = sorted(path.name for path in directory.glob("*.safetensors") if path.is_file())
    found = [name for name in names if not name.startswith(_NO_WEIGHTS)]
    parts = [part.groups() for part in map(_SHARD.fullmatch, found) if part is not None]
    if not parts:
        return found if len(found) == 1 else []
    models = {(name, count) for name, _, count in parts}
    return found if len(models) == 1 and len(parts) == len(found) == int(parts[0][2]) else []


def first_match(directory: Path, pattern: str) -> str:
    """The name of the first file that matches; empty if none does."""
    return min((path.name for path in directory.glob(pattern)), default="")


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty where it cannot be read: the tokenizer's and the engine's readers say why,
    and better.
    """
    try:
        with path.open("rb") as file:
            found: object = json.loads(file.read(JSON_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


# The directory that a model argument means.

DEMO_MODELS = ("penstock-demo", "penstock-demo-mini")
REPOSITORY = Path(__file__).parents[2]
"""The checkout; of an installed package, the directory of all packages."""
_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(/(?P<file>[\w./+-]{1,200}\.gguf))?"
    r"(@(?P<revision>[\w./-]{1,128}))?",
    re.IGNORECASE,
)
_WANTED = ["*.json", "*.jinja", "*.safetensors", "!consolidated*"]
"""Not the same weights a second time in Mistral's own layout."""


def served_name(model: ModelConfig) -> str:
    """The name that clients use, with its version if it has one."""
    return f"{plain_name(model)}@{model.version}" if model.version else plain_name(model)


def plain_name(model: ModelConfig) -> str:
    """Its name without a version: the one given, else the last part of the path."""
    if model.name:
        return model.name
    path = model.path.split("@")[0] if _HUB_ID.fullmatch(model.path) else model.path
    path = path.partition("#")[0] if path.lower().startswith(S3) else path
    name = Path(path).name or Path(path).resolve().name
    if name.lower().endswith(GGUF_SUFFIX):
        name = _SPLIT.sub("", name[: -len(GGUF_SUFFIX)]) or name
    return name


def resolve(path: str) -> Path:
    """The directory that holds the model, or its GGUF file; what lies at the hub or in object storage is
    fetched (weight_cache/).

    A demo model's name means the demo model even where a directory has that name; write `./name` for that.

    Raises:
        ConfigError: it is none of those, or its source cannot give it.
        CheckpointError: the directory holds no model.
    """
    if path in DEMO_MODELS:
        return _demo(path)
    try:
        found = _here(path)
    except (OSError, RuntimeError) as error:  # No permission, a name too long, no such user after `~`.
        raise ConfigError(f"{path}: {error}") from error
    if found is not None:
        return found
    if path.lower().startswith(S3):
        return _from_s3(path)
    if path.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(path):
        raise ConfigError(_no_such_model(path))
    return _from_hub(path)


def _here(path: str) -> Path | None:
    place = Path(path).expanduser()
    return path_of(place) if place.exists() else None


def _demo(name: str) -> Path:
    """A wheel has the demo models within the package, a checkout in its root."""
    for place in _demo_places():
        if (place / name / "config.json").is_file():
            return place / name
    places = " nor in ".join(str(place) for place in _demo_places())
    remedy = "`make train-demo` makes it" if _in_checkout() else "name a model: penstock serve DIRECTORY"
    raise ConfigError(f"{name}: the demo model is not in {places}; {remedy}")


def _demo_places() -> Iterator[Path]:
    yield REPOSITORY / "penstock" / "demo_models"
    if _in_checkout():
        yield REPOSITORY / "models"


def _in_checkout() -> bool:
    """Whether what lies beside the package is ours: an installed package lies among others."""
    return (REPOSITORY / "pyproject.toml").is_file()


def _no_such_model(path: str) -> str:
    if near := difflib.get_close_matches(path, DEMO_MODELS, n=1):
        return f"{path}: no such directory; did you mean `{near[0]}`?"
    known = " and ".join(DEMO_MODELS)
    return f"{path}: no such directory, and not a hub id (owner/name); the built-in models are {known}"


def _from_hub(hub_id: str) -> Path:
    named = _HUB_ID.fullmatch(hub_id)
    assert named is not None
    repo, file, revision = named["repo"], named["file"], named["revision"]
    # Of a file that was split, all parts.
    wanted = _WANTED if file is None else [re.sub(r"-00001-of-(\d{5}\.)", r"-*-of-\1", file)]
    try:
        directory = fetched_from_hub(repo, revision, wanted)
    except SourceError as error:
        raise ConfigError(f"{hub_id}: no such directory, and the hub does not give it: {error}") from error
    if file is not None:
        if not (directory / file).is_file():
            raise ConfigError(f"{hub_id}: the hub's {repo} has no file {file}")
        return path_of(directory / file)
    if not (directory / "config.json").is_file():
        if (gguf := gguf_in(directory)) is not None:
            return path_of(gguf)
        raise ConfigError(f"{hub_id}: has no config.json; one of its GGUF files is {repo}/NAME{GGUF_SUFFIX}")
    return directory


def _from_s3(url: str) -> Path:
    url, _, fragment = url.partition("#")
    digest = fragment.removeprefix("digest=")
    if fragment and (digest == fragment or not digest):
        raise ConfigError(f"{url}: expected #digest=HEX behind it, got #{fragment[:64]}")
    try:
        directory = fetched_from_s3(url, (*_WANTED, f"*{GGUF_SUFFIX}"), digest.lower())
    except SourceError as error:
        raise ConfigError(f"{url}: cannot be read: {error}") from error
    return path_of(directory)


# The models' settings that a running server takes from a new configuration: who computes them, their
# adapters, and nothing else.

MEMBERS = ("replicas", "workers", "discover", "adapters")
"""Fields of a model that say who its workers are, and which adapters they have."""


def with_members(running: Sequence[ModelConfig], new: Sequence[ModelConfig]) -> tuple[ModelConfig, ...]:
    """The running models, each with the workers that `new` gives the model of its name.

    Models that come or go, and all other settings, wait for a restart.
    """
    by_name = {served_name(model): model for model in new}

    def member(model: ModelConfig) -> ModelConfig:
        wanted = by_name.get(served_name(model), model)
        return replace(model, **{name: getattr(wanted, name) for name in MEMBERS})

    return tuple(member(model) for model in running)
