import pytest

from penstock.config.tree import EngineConfig
from penstock.engine.memory import (
    ADAPTER_BYTES_MAX,
    CPU_KV_BYTES_MAX,
    GPU_SHARE,
    KVBudget,
    free_memory_bytes,
    plan_adapter_bytes,
    plan_kv,
)
from penstock.errors import ConfigError
from penstock.models.spec import DecoderSpec, RopeSpec

SPEC = DecoderSpec(
    architecture="", vocab_size=100, hidden_size=64, intermediate_size=64, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=32, max_position=2048, norm_eps=1e-6, rope=RopeSpec(),
)  # fmt: skip
BLOCK_BYTES = 4 * 2 * 16 * 2 * 32 * 2
GIB = 1024**3


def plan(free_bytes: int = 64 * GIB, **config: object) -> KVBudget:
    return plan_kv(EngineConfig(**config), SPEC, bytes_per_value=2, free_bytes=free_bytes)


def test_never_more_than_all_requests_at_their_longest() -> None:
    assert plan(max_running=8) == KVBudget(8 * 2048 // 16, 2048)
    assert plan(max_running=8, max_model_len=100) == KVBudget(8 * 7, 100)


def test_a_share_of_the_free_memory_up_to_the_bound() -> None:
    assert plan(free_bytes=1000 * BLOCK_BYTES).num_blocks == 300
    assert plan(max_running=100_000).num_blocks == CPU_KV_BYTES_MAX // BLOCK_BYTES


def test_explicit_bytes_are_taken_as_they_are() -> None:
    assert plan(kv_memory_bytes=5000 * BLOCK_BYTES + 1, max_running=1).num_blocks == 5000


def test_the_context_shrinks_to_the_memory_unless_it_was_asked_for() -> None:
    assert plan(kv_memory_bytes=10 * BLOCK_BYTES) == KVBudget(10, 160)
    with pytest.raises(
        ConfigError, match=r"engine.kv_memory_bytes leaves 160 tokens.*engine.max_model_len is 161"
    ):
        plan(kv_memory_bytes=10 * BLOCK_BYTES, max_model_len=161)
    with pytest.raises(ConfigError, match=r"30% of what is free leaves 480 tokens.*engine.max_model_len"):
        plan(free_bytes=100 * BLOCK_BYTES, max_model_len=481)


def test_impossible_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"engine.max_model_len is 4096.*2048"):
        plan(max_model_len=4096)
    with pytest.raises(ConfigError, match=r"engine.kv_memory_bytes is .* but only 1000 bytes"):
        plan(free_bytes=1000, kv_memory_bytes=10 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match="30% of what is free leaves no room"):
        plan(free_bytes=BLOCK_BYTES)


def test_this_machine_has_memory() -> None:
    assert free_memory_bytes() > 0


def test_a_device_of_its_own_gives_more_and_without_the_bound() -> None:
    budget = plan_kv(
        EngineConfig(max_running=100_000), SPEC, bytes_per_value=2, free_bytes=64 * GIB, share=GPU_SHARE
    )
    assert budget.num_blocks == int(64 * GIB * GPU_SHARE.fraction) // BLOCK_BYTES


def test_adapters_have_a_part_of_what_is_free_and_never_what_the_cache_has() -> None:
    def given(free_bytes: int, taken_bytes: int, **config: object) -> int:
        return plan_adapter_bytes(EngineConfig(**config), free_bytes=free_bytes, taken_bytes=taken_bytes)

    assert given(10 * GIB, 4 * GIB) == GIB
    assert given(100 * GIB, 8 * GIB) == ADAPTER_BYTES_MAX
    assert given(10 * GIB, 10 * GIB - 5) == 5
    assert given(10 * GIB, 11 * GIB) == 0
    assert given(10 * GIB, 4 * GIB, adapter_slots=0) == 0
    assert given(10 * GIB, 4 * GIB, adapter_memory_bytes=6 * GIB) == 6 * GIB
    with pytest.raises(ConfigError, match=r"adapter_memory_bytes is 7516192768, but only 6442450944"):
        given(10 * GIB, 4 * GIB, adapter_memory_bytes=7 * GIB)
