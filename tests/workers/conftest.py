"""Real servers of others, started once for all tests that need them. `make test-workers` installs them first.

PENSTOCK_TEST_VLLM names one that runs already (its URL), serving the 28M model as "served" with ADAPTERS, and
publishing KV events at KV_EVENTS and KV_REPLAY.
"""

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from known_shapes import SHAPES, make_model
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "bench" / "out" / "peers"
START_TIMEOUT_S = 400.0
KV_EVENTS, KV_REPLAY = "tcp://127.0.0.1:9374", "tcp://127.0.0.1:9375"
"""Where the real vLLM tells its KV events."""
ADAPTERS = ("tone", "brief")
StartVllm = Callable[[], AbstractContextManager[tuple[str, "subprocess.Popen[bytes]"]]]


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    started = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        if process.poll() is not None or time.monotonic() - started > START_TIMEOUT_S:
            pytest.fail(f"{url} does not answer; {log} ends:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def real_vllm(
    model: Path, place: Path, port: int, *options: str
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A real vLLM on the CPU, in a process group of its own: its URL, and its first process."""
    program, log = PEERS / "vllm" / "bin" / "vllm", place / "log"
    if not program.exists():
        pytest.fail("vLLM is not installed: bench/peers/install_vllm.sh")
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CACHE_ROOT": str(PEERS / "vllm-cache"),
    }
    command = [str(program), "serve", str(model), "--served-model-name", "served", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", "2048", "--enable-prompt-tokens-details", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/health", process, log)
        compile_all(url)
        yield url, process
    finally:
        stop(process)


def compile_all(url: str) -> None:
    """Have vLLM compile what it compiles at first use, which takes a slow processor longer than a test waits
    for tokens.

    With log-probabilities it ranks tokens by a function that no request without them needs.
    """
    asked = {"model": "served", "prompt": [10, 11, 12], "max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:
        assert json.load(answer)["choices"]


@pytest.fixture(scope="session")
def model_28m() -> Path:
    """The 28M model with weights that were made up, which every engine loads."""
    return make_model(SHAPES["28m"], ROOT / "bench" / "out" / "models" / "28m")


def make_adapter(path: Path, model: Path, seed: int) -> Path:
    """A low-rank adapter of the model's queries and values, with weights that were made up, as PEFT writes
    it.
    """
    shape, draw, rank = json.loads((model / "config.json").read_text()), np.random.default_rng(seed), 8
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    wide = {"q_proj": hidden, "v_proj": hidden // heads * shape["num_key_value_heads"]}
    weights: dict[str, np.ndarray] = {}
    for layer in range(shape["num_hidden_layers"]):
        for part, out in wide.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = draw.normal(0, 0.05, (rank, hidden)).astype(np.float32)
            weights[f"{name}.lora_B.weight"] = draw.normal(0, 0.05, (out, rank)).astype(np.float32)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "bias": "none"}
    settings |= {"lora_dropout": 0.0, "target_modules": [*wide], "base_model_name_or_path": "28m"}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="session")
def adapter_of(model_28m: Path) -> Callable[[Path, int], Path]:
    """Writes one for the 28M model into a directory; equal seeds, equal adapters: ADAPTERS have 0, 1."""
    return lambda path, seed: make_adapter(path, model_28m, seed)


@pytest.fixture(scope="session")
def vllm_url(model_28m: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real vLLM on the CPU, which takes more than a minute to start."""
    if url := os.environ.get("PENSTOCK_TEST_VLLM"):
        yield url
        return
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:9374",
        "replay_endpoint": "tcp://*:9375",
    }
    adapters = tmp_path_factory.mktemp("adapters")
    options = ["--kv-events-config", json.dumps(events)]
    options += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "1", "--lora-modules"]
    options += [
        f"{name}={make_adapter(adapters / name, model_28m, seed)}" for seed, name in enumerate(ADAPTERS)
    ]
    place = tmp_path_factory.mktemp("vllm")
    with real_vllm(model_28m, place, 9372, *options) as (url, _):
        yield url


@pytest.fixture
def start_vllm(model_28m: Path, tmp_path: Path) -> StartVllm:
    """Starts one of the test's own, that it may kill."""
    return lambda: real_vllm(model_28m, tmp_path, 9377)


@pytest.fixture(scope="session")
def triton_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A real tritonserver with a python model that streams (decoupled): its address, and that of its
    metrics.
    """
    found = sorted((PEERS / "triton").glob("lib/python3*/site-packages/pytriton"))
    if not found:
        pytest.fail("Triton is not installed: bench/peers/install_triton.sh")
    home, place = found[0] / "tritonserver", tmp_path_factory.mktemp("triton")
    log, backend = place / "log", place / "backends" / "python"
    backend.mkdir(parents=True)
    stub = (
        home
        / "python_backend_stubs"
        / found[0].parents[1].name.removeprefix("python")
        / "triton_python_backend_stub"
    )
    for file in (*(home / "backends" / "python").iterdir(), stub):
        (backend / file.name).symlink_to(file)
    environment = {
        **os.environ,
        "TRITON_SITE_PACKAGES": str(found[0].parent),
        "LD_LIBRARY_PATH": str(found[0].parent / "nvidia_pytriton.libs"),
    }
    command = [
        str(home / "bin" / "tritonserver"),
        "--model-repository",
        str(Path(__file__).parent / "triton_models"),
    ]
    command += [
        "--backend-directory",
        str(backend.parent),
        "--http-address",
        "127.0.0.1",
        "--http-port",
        "9381",
    ]
    command += ["--metrics-address", "127.0.0.1", "--metrics-port", "9382", "--allow-grpc", "false"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_for("http://127.0.0.1:9381/v2/health/ready", process, log)
        yield "http://127.0.0.1:9381", "http://127.0.0.1:9382"
    finally:
        stop(process)
