import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.http.engine_metrics import (
    LINES_MAX,
    LOAD_NAMES,
    EngineLoad,
    Sample,
    load_of,
    parse_metrics,
)

# As vLLM 0.32, SGLang 0.5, TGI 3, TensorRT-LLM 1.2 and Triton 2.51 write them, cut to what matters.
VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="served"} 3.0
vllm:num_requests_running{engine="1",model_name="served"} 2.0
vllm:num_requests_running{engine="0",model_name="other"} 9.0
vllm:num_requests_waiting{engine="0",model_name="served"} 4.0
vllm:num_requests_waiting{engine="1",model_name="served"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="served"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="served"} 0.75
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
"""
SGLANG = b"""sglang:num_running_reqs{engine_type="unified",model_name="served",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="served",tp_rank="0"} 1.0
sglang:token_usage{engine_type="unified",model_name="served",tp_rank="0"} 0.5
sglang:max_total_num_tokens{model_name="served"} 16000.0
"""
TGI = (
    b"# TYPE tgi_batch_current_size gauge\ntgi_batch_current_size 5\n# TYPE tgi_queue_size "
    b"gauge\ntgi_queue_size 2\n"
)
TRTLLM = (
    b"trtllm_num_requests_running 3.0\ntrtllm_num_requests_waiting "
    b'1.0\ntrtllm_kv_cache_utilization{engine_type="trtllm"} 0.62\n'
)
TRITON = (
    b'nv_inference_pending_request_count{model="served",version="1"} '
    b'7\nnv_inference_pending_request_count{model="other",version="1"} 1\n'
)


def load(engine: str, text: bytes) -> EngineLoad:
    names = LOAD_NAMES[engine]
    return load_of(parse_metrics(text, names.all()), names, model="served")


@pytest.mark.parametrize(
    ("engine", "text", "expected"),
    [
        ("vllm", VLLM, EngineLoad(running=5, waiting=4, kv_usage=0.5, kv_tokens=32_000)),
        ("sglang", SGLANG, EngineLoad(running=3, waiting=1, kv_usage=0.5, kv_tokens=16000)),
        ("tgi", TGI, EngineLoad(running=5, waiting=2)),
        ("trtllm", TRTLLM, EngineLoad(running=3, waiting=1, kv_usage=0.62)),
        ("triton", TRITON, EngineLoad(waiting=7)),
    ],
)
def test_each_engine_by_its_own_names(engine: str, text: bytes, expected: EngineLoad) -> None:
    assert load(engine, text) == expected


# As a vLLM 0.32 with two adapters told, of which requests had used one, then none, then the other.
ADAPTERS = b"""# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="2",running_lora_adapters="tone",waiting_lora_adapters="tone"} \
1.7953242293197067e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.7953242301205058e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="brief",waiting_lora_adapters="brief"} \
1.7953242299431458e+09
"""


def test_adapters_that_were_used_last_are_loaded_as_many_as_there_is_room_for() -> None:
    def used(text: bytes) -> tuple[str, ...] | None:
        names = LOAD_NAMES["vllm"]
        return load_of(parse_metrics(text, names.all(), timed="vllm:lora_requests_info"), names).adapters

    assert used(VLLM) is None
    assert used(ADAPTERS) == ("tone", "brief")
    assert used(ADAPTERS.replace(b'max_lora="2"', b'max_lora="1"')) == ("brief",)
    line = (
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="a%d,a%d",waiting_lora_adapters=""} %d\n'
    )
    many = "".join(line % (i, i + 1, i) for i in random.Random(0).sample(range(5000), 5000))
    assert used(many.encode()) == ("a4999", "a5000"), "what vLLM never forgets is no reason to read nothing"


def test_an_older_name_counts_where_the_new_one_is_not_there() -> None:
    older = VLLM.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc")
    assert load("vllm", older).kv_usage == 0.5


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (b"", ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")),
        (VLLM.replace(b"num_requests_waiting", b"num_requests_renamed"), ("vllm:num_requests_waiting",)),
        (VLLM.replace(b" 3.0", b" NaN").replace(b" 2.0", b" +Inf"), ("vllm:num_requests_running",)),
        (VLLM.replace(b'model_name="served"', b'model_name="renamed"'), None),
    ],
)
def test_what_is_not_there_is_missing_and_never_zero(text: bytes, missing: tuple[str, ...] | None) -> None:
    found = load("vllm", text)
    if missing is None:
        assert len(found.missing) == 3
    else:
        assert found.missing == missing
    if "vllm:num_requests_running" in found.missing:
        assert found.running is None


def test_labels_are_unescaped_and_the_rest_of_a_line_is_left() -> None:
    line = rb'm{a="x\"}\\ \n",b=""} 4.5 1700000000 # {trace="1"} 1'
    assert parse_metrics(line, ["m"]) == {"m": [Sample({"a": 'x"}\\ \n', "b": ""}, 4.5)]}


@given(text=st.binary(max_size=400))
def test_any_bytes_are_read_or_left_out(text: bytes) -> None:
    for page in (text, b"m{" + text, b"m " + text, b'm{a="' + text + b'"} 1'):
        for samples in parse_metrics(page, ["m"]).values():
            assert samples


def test_pages_are_bounded() -> None:
    with pytest.raises(ValueError, match="lines"):
        parse_metrics(b"\n" * (LINES_MAX + 1), ["m"])
    with pytest.raises(ValueError, match="samples"):
        parse_metrics(b"m 1\n" * 5000, ["m"])
    assert parse_metrics(b'm{a="' + b"x" * 20_000 + b'"} 1\n', ["m"]) == {}
