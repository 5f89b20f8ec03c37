"""Low-rank adapters: equal to PEFT's own on every family, alone and in a mixed batch; hostile files."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import Driver, tiny_runner
from lora_checkpoints import LINEARS, write_adapter
from safetensors.torch import load_file, save_file
from tiny_models import PHI3, VOCAB_SIZE, save, tiny_model

from penstock.engine.adapters import files
from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.engine.runner import Runner
from penstock.errors import CheckpointError
from penstock.models.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter_config
from penstock.rng import stream
from penstock.types import SamplingParams

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore:The following:RuntimeWarning",
    "ignore:Found missing adapter keys:UserWarning",  # Of the part that sees.
)

GEMMA2 = {
    "sliding_window": 21,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 7.0,
}
MODELS: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 37},
    "qwen2": {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    "qwen3": {},
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3": {"sliding_window": 33, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20},
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "gemma3_whole": {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 33},
    "mistral3_whole": {"sliding_window": 50},
}
MAX_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE, max_tokens=MAX_TOKENS)


def kernels() -> list[str]:
    try:
        NativeLibrary()
    except KernelsUnavailable:
        return ["torch"]
    return ["torch", "native"]


def prompt_of(length: int) -> list[int]:
    random = stream(30, "adapters")
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("family", list(MODELS))
def test_answers_are_those_of_peft(family: str, tmp_path: Path) -> None:
    """32 greedy tokens and every log-probability of them, in a batch with the plain model."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = tiny_model(family, **MODELS[family])
    path = save(model, tmp_path / "model")
    # Of mixtures attention alone: PEFT would take the names of a feed-forward layer for its experts'.
    targets = LINEARS[:4] if family in ("mixtral", "qwen3_moe") else LINEARS
    adapter = write_adapter(tmp_path / "fr", model, rank=5, targets=targets)
    prompt = prompt_of(40)
    found = {
        kind: Driver(path, {"fr": adapter}, kernels=kind).ask([prompt] * 2, [GREEDY] * 2, adapters=["fr", ""])
        for kind in kernels()
    }
    reference = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    for index in (0, 1):
        if index:
            reference = reference.unload()  # Changes the model back: this comes last.
        for answers in found.values():
            answer = answers[index]
            tokens = prompt + answer.token_ids
            with torch.no_grad():
                logits = reference(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].float()
            expected = torch.log_softmax(logits, -1)
            assert answer.token_ids == expected.argmax(-1).tolist()
            reported = torch.zeros_like(expected)
            for row, logprob in zip(reported, answer.logprobs, strict=True):
                for token, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
                    row[token] = value
            assert (reported - expected).abs().max() < 2e-5
    assert found["torch"][0].token_ids != found["torch"][1].token_ids


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = save(tiny_model("qwen3"), tmp_path_factory.mktemp("qwen3"))
    return tiny_runner(path, kernels=kernels()[-1])


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a", tiny_model("qwen3"))


def read(runner: Runner, directory: Path, digest: str = "") -> str:
    assert runner.adapters is not None
    return runner.adapters.read(directory, digest)[0]


def test_ranks_and_scales(tmp_path: Path) -> None:
    """A rank of each module's own, an alpha of one module's own, and the rank-stabilised scale."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = tiny_model("qwen3")
    path, prompt = save(model, tmp_path / "model"), prompt_of(20)
    adapter = write_adapter(
        tmp_path / "a",
        model,
        rank=4,
        config='"use_rslora": true, "alpha_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 20}, '
        '"rank_pattern": {"v_proj": 2}',
    )
    tensors = load_file(adapter / WEIGHTS_FILE)
    for name, tensor in tensors.items():
        if "v_proj" in name:
            tensors[name] = (tensor[:2] if "lora_A" in name else tensor[:, :2]).contiguous()
    save_file(tensors, adapter / WEIGHTS_FILE)
    [answer] = Driver(path, {"a": adapter}).ask([prompt], [GREEDY], adapters=["a"])
    reference = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert answer.token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_on_rounded_weights(quantization: str, tmp_path: Path) -> None:
    """The adapter's part is added in full precision: the answer moves as it does on whole weights."""
    if "native" not in kernels():
        pytest.skip("the native kernels were not built")
    model = tiny_model("qwen3", hidden_size=64, intermediate_size=128)
    path, adapter = save(model, tmp_path / "model"), write_adapter(tmp_path / "a", model, rank=128)
    one = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE, max_tokens=1)

    def reported(**config: object) -> list[torch.Tensor]:
        driver = Driver(path, {"a": adapter}, kernels="native", dtype="bfloat16", **config)
        answers = driver.ask([prompt_of(30)] * 2, [one] * 2, adapters=["a", ""])
        rows = [torch.zeros(VOCAB_SIZE) for _ in answers]
        for row, answer in zip(rows, answers, strict=True):
            for token, value in answer.logprobs[0].top:
                row[token] = value
        return rows

    (whole, whole_plain), (rounded, rounded_plain) = reported(), reported(quantization=quantization)
    moved, off = (whole - whole_plain).norm(), (whole - rounded).norm()
    assert off < 0.5 * moved
    assert (rounded - rounded_plain).norm() > 0.5 * moved


def rewrite(directory: Path, **fields: object) -> None:
    """Change the configuration."""
    path = directory / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "use_dora is set: adapters with DoRA are not supported"),
        ({"bias": "all"}, "bias is 'all', expected 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"r": 129}, "r is 129, expected 1 to 128"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": "8"}, "not the configuration of a PEFT adapter"),
        ({"alpha_pattern": {"(a+)+b": 2}}, "no other regular expression"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model too"),
        ({"r": 5}, "lora_A.weight has shape [4, 72], expected [5, 72]"),
    ],
)
def test_configurations_that_are_refused(
    runner: Runner, adapter: Path, fields: dict[str, object], words: str
) -> None:
    rewrite(adapter, **fields)
    with pytest.raises(CheckpointError) as raised:
        read(runner, adapter)
    assert words in str(raised.value)
    assert str(adapter) in str(raised.value)


HEAD = "base_model.model.lm_head.lora_A.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (Q, torch.zeros(4, 47), "q_proj.lora_A.weight has shape [4, 47], expected [4, 48]: is the adapter"),
        (Q, torch.zeros(4, 48, dtype=torch.int32), "has type I32, expected one of F32"),
        (Q, torch.full((4, 48), float("nan")), "has values that are no finite numbers"),
        (Q.replace("layers.0", "layers.3"), torch.zeros(4, 48), "is of layer 3, but the model has 3"),
        (HEAD, torch.zeros(4, 48), "lm_head.lora_A.weight changes what adapters cannot change"),
        (
            Q.replace("lora_A.weight", "lora_magnitude_vector"),
            torch.zeros(4),
            "lora_magnitude_vector changes",
        ),
        (Q, None, "stands alone: lora_A is missing"),
    ],
    ids=["shape", "type", "nan", "layer", "head", "dora", "alone"],
)
def test_tensors_that_are_refused(
    runner: Runner, adapter: Path, name: str, tensor: torch.Tensor | None, words: str
) -> None:
    tensors = load_file(adapter / WEIGHTS_FILE)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, adapter / WEIGHTS_FILE)
    with pytest.raises(CheckpointError) as raised:
        read(runner, adapter)
    assert words in str(raised.value)
    assert str(adapter / WEIGHTS_FILE) in str(raised.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "truncated"),
        (struct.pack("<Q", 1 << 60), "header says that it has 1152921504606846976 bytes"),
        (struct.pack("<Q", 5 << 20) + b" " * (6 << 20), "expected at most 4194304"),
        (struct.pack("<Q", 2) + b"[]", "not one of safetensors"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "not one of safetensors"),
        (
            struct.pack("<Q", 70) + b'{"x": {"dtype": "F32", "shape": [9, 9], "data_offsets": [0, 324]}}    ',
            "which the file does not hold",
        ),
    ],
    ids=["empty", "bomb", "large", "list", "deep", "short"],
)
def test_headers_that_are_refused(runner: Runner, adapter: Path, raw: bytes, words: str) -> None:
    (adapter / WEIGHTS_FILE).write_bytes(raw)
    with pytest.raises(CheckpointError) as raised:
        read(runner, adapter)
    assert words in str(raised.value)


def test_a_pickle_is_never_read(runner: Runner, adapter: Path, tmp_path: Path) -> None:
    (adapter / WEIGHTS_FILE).unlink()
    mark = tmp_path / "mark"
    (adapter / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % str(mark).encode())
    with pytest.raises(CheckpointError, match="a pickle, which is never read"):
        read(runner, adapter)
    assert not mark.exists()


def test_a_pipe_is_not_waited_for(runner: Runner, adapter: Path) -> None:
    """One thread reads for all: it would never come back."""
    (adapter / "adapter_config.json").unlink()
    os.mkfifo(adapter / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"adapter_config.json: is no plain file"):
        read(runner, adapter)


def test_the_digest_is_of_both_files(runner: Runner, adapter: Path) -> None:
    first = read(runner, adapter)
    assert read(runner, adapter, first) == first
    rewrite(adapter, lora_alpha=9)
    with pytest.raises(CheckpointError, match=f"expected {first}"):
        read(runner, adapter, first)
    assert read(runner, adapter) != first


def test_a_file_that_changes_while_it_is_read_is_refused(
    runner: Runner, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest, which names KV blocks, would be of other bytes than those that are computed with."""
    digest = files._digest  # pyright: ignore[reportPrivateUsage]

    def then_changed(config: bytes, path: Path, pause: Callable[[], None]) -> str:
        found, tensors = digest(config, path, pause), load_file(path)
        save_file({name: tensor * 2 for name, tensor in tensors.items()}, path)
        return found

    monkeypatch.setattr(files, "_digest", then_changed)
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: was changed while it was read"):
        read(runner, adapter)


def test_a_load_may_pause_after_each_piece_of_its_work(
    runner: Runner, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner.adapters is not None
    tensors, num_pauses = load_file(adapter / WEIGHTS_FILE), list[int]()
    for read_bytes in (1 << 20, 1000):
        counted: list[None] = []
        monkeypatch.setattr(files, "_READ_BYTES", read_bytes)
        runner.adapters.read(adapter, "", lambda counted=counted: counted.append(None))
        num_pauses.append(len(counted))
    size = (adapter / WEIGHTS_FILE).stat().st_size
    assert 1000 < size < 1 << 20
    assert num_pauses[0] >= 1 + len(tensors) // 2 + 3, "the digest, pairs, and each layer's linears"
    assert num_pauses[1] == num_pauses[0] + (size - 1) // 1000


def test_an_alpha_goes_by_the_end_of_the_path() -> None:
    config = read_adapter_config(
        b'{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": {"proj": 1, "mlp.proj": 2}}', "x"
    )
    assert config.scale("layers.0.mlp.proj", 4) == 1 / 4
    assert config.scale("layers.0.mlp.o_proj", 4) == 8 / 4
