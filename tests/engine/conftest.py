from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny_models import save, tiny_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 checkpoint, float32."""
    return save(tiny_model("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral checkpoint, float32, with a window that begins inside blocks and tiles."""
    return save(tiny_model("mistral", sliding_window=45), tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="session")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 2 checkpoint, float32, with caps that bite."""
    model = tiny_model("gemma2", sliding_window=70, attn_logit_softcapping=3.0, final_logit_softcapping=7.0)
    return save(model, tmp_path_factory.mktemp("gemma2"))


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 checkpoint, float32."""
    return save(
        tiny_model("gemma3", sliding_window=150, sliding_window_pattern=2), tmp_path_factory.mktemp("gemma3")
    )


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral checkpoint, float32."""
    return save(tiny_model("mixtral", num_local_experts=5), tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama 3 checkpoint, float32, head size and hidden size that fill no vector register."""
    model = tiny_model("llama", hidden_size=40, num_attention_heads=5, num_key_value_heads=5, head_dim=24)
    return save(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a smaller one that is the same function: all its guesses are right."""
    place = tmp_path_factory.mktemp("pair")
    target, draft = tiny_model("qwen3", num_hidden_layers=4), tiny_model("qwen3", num_hidden_layers=3)
    last = cast(Any, target).model.layers[3]
    with torch.no_grad():
        last.self_attn.o_proj.weight.zero_()
        last.mlp.down_proj.weight.zero_()
    known = target.state_dict()
    draft.load_state_dict({name: known[name] for name in draft.state_dict()})
    return save(target, place / "target"), save(draft, place / "draft")
