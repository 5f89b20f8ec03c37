"""A decoder's vectors are those of transformers, however texts are batched, cut and cached."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import PHI3, VOCAB_SIZE, save, tiny_model
from vector_driver import VectorDriver
from vector_models import decoder, expected, write_modules

from penstock.errors import CheckpointError, ConfigError
from penstock.rng import stream
from penstock.types import FinishReason

LENGTHS = (1, 2, 16, 17, 40, 130)
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 21},
    "qwen2": {"head_dim": None},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "phi3": PHI3,
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3": {"sliding_window": 33, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20},
}


def texts(seed: int = 3) -> list[list[int]]:
    random = stream(seed, "texts")
    return [[random.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str, pooling: str) -> None:
    model = decoder(family, tmp_path, pooling, **FAMILIES[family])
    (reported,) = VectorDriver(tmp_path, step_tokens=64, max_running=8).ask(texts())
    torch.testing.assert_close(reported.rows, expected(model, texts(), pooling), atol=1e-5, rtol=0)
    assert reported.finish is not None
    assert reported.finish.reason is FinishReason.STOP
    assert reported.finish.usage.prompt_tokens == sum(LENGTHS)
    assert reported.finish.usage.completion_tokens == 0


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_native_kernels_and_any_cut_of_the_texts(tmp_path: Path, pooling: str) -> None:
    model = decoder("qwen3", tmp_path, pooling)
    right = expected(model, texts(), pooling)
    found = {}
    for step_tokens, running in ((512, 64), (32, 4), (7, 1)):
        driver = VectorDriver(
            tmp_path, kernels="native", step_tokens=step_tokens, max_running=running, prefix_cache=False
        )
        (reported,) = driver.ask(texts())
        torch.testing.assert_close(reported.rows, right, atol=1e-5, rtol=0)
        found[step_tokens] = reported.rows
        driver.core._scheduler.check_invariants()
    # The native kernels give a token the same bits in any company, and the mean is summed in order.
    assert torch.equal(found[512], found[32])
    assert torch.equal(found[512], found[7])


def test_what_a_cache_may_give(tmp_path: Path) -> None:
    """The last token has seen all others, so their KV may come from the cache; a mean is of tokens that were
    computed.
    """
    for pooling, cached in (("lasttoken", True), ("mean", False)):
        decoder("llama", tmp_path / pooling, pooling)
        driver = VectorDriver(tmp_path / pooling)
        (first,), (again,) = driver.ask(texts()), driver.ask(texts())
        torch.testing.assert_close(again.rows, first.rows, atol=1e-6, rtol=0)
        assert again.finish is not None
        assert bool(again.finish.usage.cached_tokens) is cached


def test_bare_decoders_and_what_the_files_say(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    bare = save(model.model, tmp_path / "bare")
    (reported,) = VectorDriver(bare).ask(texts())
    torch.testing.assert_close(reported.rows, expected(model, texts(), "lasttoken"), atol=1e-5, rtol=0)

    write_modules(bare, "mean", normalise=False, tokens_max=200, flags=False)
    driver = VectorDriver(bare)
    (reported,) = driver.ask(texts())
    right = expected(model, texts(), "mean", normalise=False)
    torch.testing.assert_close(reported.rows, right, atol=1e-5, rtol=0)
    info = driver.runner.info
    assert (info.pooling, info.vector_size, info.max_model_len) == ("mean", 48, 200)


def test_longest_text_and_one_too_long(tmp_path: Path) -> None:
    decoder("llama", tmp_path, "mean", max_position_embeddings=48)
    driver = VectorDriver(tmp_path)
    whole, longer = driver.ask([[5] * 48], [[5] * 3, [5] * 49, [5] * 3])
    assert whole.rows.shape == (1, 48)
    assert longer.finish is not None
    assert longer.finish.error_kind == "ContextTooLong"
    assert "49 tokens; the model takes 48" in (longer.finish.error or "")
    (after,) = driver.ask([[5] * 48])
    assert torch.equal(after.rows, whole.rows)


def test_many_texts_share_the_engine_and_leave_it_clean(tmp_path: Path) -> None:
    decoder("llama", tmp_path, "mean")
    driver = VectorDriver(tmp_path, max_running=4, step_tokens=64)
    many = driver.submit([[7, 8, 9]] * 300)
    few = driver.submit([[7, 8, 9]] * 2)
    while driver.reported[few].finish is None:
        driver.step()
    assert driver.reported[many].finish is None, "two texts did not wait for three hundred"
    driver.run()
    assert torch.equal(driver.reported[many].rows[299], driver.reported[few].rows[0])
    gone = driver.submit([[7, 8, 9]] * 300)
    driver.step()
    driver.core.abort(0, (gone,))
    driver.run()
    finish = driver.reported[gone].finish
    assert finish is not None
    assert finish.reason is FinishReason.ABORT
    assert driver.core.stats().blocks_used == 0


WRONG = {
    "inputs": {"inputs": (2, 2)},
    "none": {"inputs": ()},
    "empty": {"inputs": (3, 0)},
    "firsts": {"firsts": (4,)},
    "token": {"prompt": b"\xff\xff\x00\x00" * 3},
    "odd": {"prompt": b"\x01\x00\x00"},
    "adapter": {"adapter": "fr"},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_submission_that_makes_no_sense_ends_alone(tmp_path: Path, name: str) -> None:
    from msgspec.structs import replace

    from penstock.protocol.worker import Submit

    decoder("llama", tmp_path, "mean")
    driver = VectorDriver(tmp_path)
    good = driver.submit([[1, 2, 3]])
    reported = []
    message = replace(
        Submit(request_id="bad", prompt=b"\1\0\0\0" * 3, sampling=driver_sampling(), inputs=(3,)),
        **WRONG[name],
    )
    driver.core.submit(1, message, 0)
    while driver.core.has_work:
        for owner, outputs in driver.core.step().items():
            reported += [(owner, output) for output in outputs if output.finish is not None]
    kinds = {owner: output.finish.error_kind for owner, output in reported}
    assert kinds == {0: None, 1: "InvalidRequest"}
    assert good


def driver_sampling():
    from penstock.types import SamplingParams

    return SamplingParams(max_tokens=1)


def test_files_that_are_not_supported(tmp_path: Path) -> None:
    decoder("llama", tmp_path, "max")
    with pytest.raises(CheckpointError, match=r"1_Pooling/config.json: pools by pooling_mode_max_tokens"):
        VectorDriver(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.Dense"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"modules.json: has a module 'Dense'"):
        VectorDriver(tmp_path)
    modules[1]["path"] = "../elsewhere"
    modules[2]["type"] = "sentence_transformers.models.Normalize"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"lies in '../elsewhere', outside of it"):
        VectorDriver(tmp_path)


def test_a_device_that_it_does_not_use(tmp_path: Path) -> None:
    decoder("llama", tmp_path, "mean")
    with pytest.raises(ConfigError, match=r"engine.device is cuda"):
        VectorDriver(tmp_path, device="cuda")
