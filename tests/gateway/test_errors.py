"""Every refusal a client can meet, over HTTP: status, OpenAI's error object, headers."""

import json
import urllib.error
import urllib.request

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import EngineFault, StreamBroken

CHAT = "/v1/chat/completions"


def fetch(running, path, body=None, *, method=None, key=None, headers=None):
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | (headers or {})
    request = urllib.request.Request(running.url + path, data, headers, method=method)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def check(answer, status, code, words=""):
    got, headers, body = answer
    assert got == status, body
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert words in error["message"]
    assert headers["content-type"] == "application/json"
    return headers, error


def test_paths_and_verbs(gateway, kit):
    check(fetch(gateway, "/v1/nothing", key=kit.KEY), 404, "unknown_path", "/v1/nothing")
    check(fetch(gateway, "/v2/chat", {}, key=kit.KEY), 404, "unknown_path")
    headers, _ = check(fetch(gateway, CHAT, key=kit.KEY), 405, "method_not_allowed", "GET")
    assert headers["allow"] == "POST, OPTIONS"
    headers, _ = check(fetch(gateway, "/v1/models", {}, key=kit.KEY), 405, "method_not_allowed", "POST")
    assert headers["allow"] == "GET, HEAD, OPTIONS"
    check(fetch(gateway, "/health", method="DELETE"), 405, "method_not_allowed", "DELETE")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/tokenize", "/v1/detokenize"])
def test_keys(gateway, kit, path):
    headers, error = check(fetch(gateway, path, {}), 401, "invalid_api_key", "didn't provide an API key")
    assert headers["www-authenticate"].startswith("Bearer")
    assert error["type"] == "invalid_request_error"
    check(fetch(gateway, path, {}, key="sk-wrong"), 401, "invalid_api_key", "Incorrect API key")
    check(fetch(gateway, path, {}, key=kit.KEY + "x"), 401, "invalid_api_key")
    check(fetch(gateway, path, {}, headers={"Authorization": "Basic abc"}), 401, "invalid_api_key")


def test_the_second_key_works_too(gateway, kit):
    assert fetch(gateway, "/v1/models", key="sk-other-key-0123456789")[0] == 200


BAD_CHATS = [
    ({}, 400, "missing_required_parameter", "'model'"),
    ({"messages": []}, 400, "empty_array", "at least one message"),
    ({"model": "gpt-9"}, 404, "model_not_found", "'gpt-9' does not exist. This server has 'tiny'."),
    ({"temprature": 1}, 400, "unknown_parameter", "Did you mean temperature?"),
    ({"temperature": 9}, 400, "invalid_value", "at most 2"),
    ({"n": "two"}, 400, "invalid_type", "expected an integer"),
    ({"n": 10**400}, 400, "invalid_value", ""),
    ({"max_tokens": -5}, 400, "invalid_value", "at least 1"),
    (
        {"max_tokens": 10**9},
        400,
        "context_length_exceeded",
        "you requested 1000000023 tokens (23 in the messages",
    ),
    ({"presence_penalty": 2.5}, 400, "invalid_value", "'presence_penalty'"),
    ({"max_tokens": 3, "min_tokens": 4}, 400, "invalid_value", "'min_tokens': expected at most max_tokens"),
    ({"min_tokens": 40_000}, 400, "invalid_value", "at most max_tokens, which is 32745 here"),
    ({"logit_bias": {"32768": 1}}, 400, None, "'logit_bias': token id 32768 is not in the vocabulary"),
    ({"tool_choice": "required"}, 400, "invalid_value", "'tools' must be given"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_by_model", "by the model 'tiny'"),
    ({"chat_template_kwargs": {"messages": 1}}, 400, None, "may not set 'messages'"),
]


@pytest.mark.parametrize(("fields", "status", "code", "words"), BAD_CHATS)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_chats(gateway, kit, fields, status, code, words, stream):
    body = kit.chat(stream=stream, **{"model": "tiny", **fields}) if fields else {"messages": []}
    check(fetch(gateway, CHAT, body, key=kit.KEY), status, code, words)


def test_a_prompt_over_the_context_says_the_numbers(gateway, kit):
    words = "maximum context length is 32768 tokens. However, your messages resulted in 40021 tokens"
    body = kit.chat(messages=[{"role": "user", "content": "x" * 40_000}])
    check(fetch(gateway, CHAT, body, key=kit.KEY), 400, "context_length_exceeded", words)
    body = {"model": "tiny", "prompt": "x" * 40_000}
    check(
        fetch(gateway, "/v1/completions", body, key=kit.KEY), 400, "context_length_exceeded", "40000 tokens"
    )


def test_token_ids_outside_the_vocabulary(gateway, kit):
    body = {"model": "tiny", "prompt": [1, 99_999]}
    check(fetch(gateway, "/v1/completions", body, key=kit.KEY), 400, None, "token id 99999")
    check(fetch(gateway, "/v1/detokenize", {"tokens": [99_999]}, key=kit.KEY), 400, None, "token id 99999")


def test_broken_json_says_where(gateway, kit):
    check(fetch(gateway, CHAT, b'{"model": NaN}', key=kit.KEY), 400, "invalid_json", "(byte 10)")
    check(fetch(gateway, CHAT, b"", key=kit.KEY), 400, "invalid_json", "ends too early")
    check(fetch(gateway, CHAT, b'{"model":"\xff"}', key=kit.KEY), 400, "invalid_json", "UTF-8")


def test_too_many_streams(start, kit):
    config = kit.replace(kit.make_config(), limits={"concurrent_max": 2})
    running = start(config)
    body = kit.chat(n=3, max_tokens=1)
    headers, error = check(fetch(running, CHAT, body, key=kit.KEY), 429, "overloaded", "2 concurrent streams")
    assert headers["retry-after"] == "1"
    assert error["type"] == "rate_limit_exceeded"
    assert fetch(running, CHAT, kit.chat(n=2, max_tokens=1), key=kit.KEY)[0] == 200
    assert running.gateway._dispatcher.num_streams == 0
    assert b'outcome="shed"} 1.0' in fetch(running, "/metrics")[2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_worker_is_503_before_the_first_byte(start, kit, stream):
    config = kit.replace(kit.make_config(), queue={"no_worker_wait_s": 0.0})
    running = start(config, step_s=30)
    running.call(running.backend.lose_worker)
    headers, _ = check(
        fetch(running, CHAT, kit.chat(stream=stream), key=kit.KEY),
        503,
        "worker_unavailable",
        "The model 'tiny' has no worker now",
    )
    assert headers["retry-after"] == "1"
    running.call(running.backend.recover)
    raw = kit.Raw(running)
    raw.send(kit.post(CHAT, kit.chat(stream=stream), "Connection: close"))
    running.wait_until(lambda: running.backend.num_streams == 1)
    running.call(running.backend.lose_worker)
    assert raw.read_all().startswith(b"HTTP/1.1 503 ")
    raw.close()


@pytest.mark.parametrize(("error", "status"), [(EngineFault("NaN logits"), 500), (StreamBroken("gone"), 502)])
def test_a_worker_that_fails_one_of_several_choices(start, kit, error, status):
    running = start(step_s=30)
    running.backend.resumes = False
    raw = kit.Raw(running)
    raw.send(kit.post(CHAT, kit.chat(n=3), "Connection: close"))
    running.wait_until(lambda: running.backend.num_streams == 3)
    running.call(lambda: running.backend.fail(running.requests[-2].request_id, error))
    answer = raw.read_all()
    raw.close()
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert str(error).encode() in answer
    assert running.backend.num_streams == 0
    assert running.gateway._dispatcher.num_streams == 0


def test_a_bug_is_500_without_details_and_is_logged(start, kit):
    def broken(request):
        raise RuntimeError("secret detail")

    running = start(script=broken)
    answer = fetch(running, CHAT, kit.chat(), key=kit.KEY)
    _, error = check(answer, 500, "internal_error", "The server had an error")
    assert "secret" not in error["message"]
    assert "secret detail" in running.log_text.getvalue()
    assert "Traceback" in running.log_text.getvalue()
    assert fetch(running, "/health")[0] == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["n", "stop", "seed", "tools", "logprobs", "temperature", "stream", "stream_options", "top_k", "messages",
     "max_tokens", "tool_choice", "response_format", "user", "chat_template_kwargs", "stop_token_ids"]
)  # fmt: skip


@given(st.dictionaries(FIELDS, JSON, max_size=4))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_request_is_a_server_error(gateway, kit, fields):
    body = {**kit.chat(max_tokens=2), **fields}
    status, _, answer = fetch(gateway, CHAT, body, key=kit.KEY)
    assert status in (200, 400), answer
