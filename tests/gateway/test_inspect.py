"""The endpoints that look, over HTTP."""

import json
import urllib.error
import urllib.request

from penstock.backends.base import Phase
from penstock.gateway.identity.tenancy import is_local
from penstock.telemetry.costs import cost_accounts


def fetch(running, path, body=None, **headers):
    data = None if body is None else json.dumps(body).encode()
    headers = {"content_type": "application/json"} | headers
    request = urllib.request.Request(
        running.url + path, data, {k.replace("_", "-"): v for k, v in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def test_tokenize_and_back(gateway, kit):
    auth = {"Authorization": f"Bearer {kit.KEY}"}
    for path in ("/v1/tokenize", "/tokenize"):
        status, _, body = fetch(gateway, path, {"model": "tiny", "prompt": "aé"}, **auth)
        answer = json.loads(body)
        assert status == 200
        assert set(answer) == {"count", "max_model_len", "tokens"}
        assert answer["count"] == len(answer["tokens"]) == 3
        assert answer["max_model_len"] == 32_768
    back = fetch(gateway, "/v1/detokenize", {"model": "tiny", "tokens": answer["tokens"]}, **auth)
    assert json.loads(back[2]) == {"prompt": "aé"}
    assert json.loads(fetch(gateway, "/v1/tokenize", {"prompt": ""}, **auth)[2])["count"] == 0


def test_tokenize_messages(gateway, kit):
    auth = {"Authorization": f"Bearer {kit.KEY}"}
    messages = [{"role": "user", "content": "hi"}]
    with_prompt = json.loads(fetch(gateway, "/v1/tokenize", {"messages": messages}, **auth)[2])
    without = json.loads(
        fetch(gateway, "/v1/tokenize", {"messages": messages, "add_generation_prompt": False}, **auth)[2]
    )
    assert with_prompt["count"] - without["count"] == len("<|assistant|>")


def test_long_prompts_are_tokenized_in_a_thread(gateway, kit):
    auth = {"Authorization": f"Bearer {kit.KEY}"}
    text = "word " * 20_000
    body = fetch(gateway, "/v1/tokenize", {"prompt": text}, **auth)[2]
    assert json.loads(body)["count"] == len(text)


def test_health_is_open(gateway):
    assert fetch(gateway, "/health")[0] == 200
    assert fetch(gateway, "/health?x=1")[0] == 200


def test_ready_says_what_is_missing(start):
    running = start()
    status, _, body = fetch(running, "/ready")
    assert status == 200
    assert json.loads(body)["status"] == "ready"

    def loading():
        running.backend.show(Phase.LOADING, "loading weights", done=1, total=4)

    running.call(loading)
    status, _, body = fetch(running, "/ready")
    assert status == 503
    answer = json.loads(body)
    assert answer["status"] == "loading"
    (model,) = answer["models"]
    assert (model["name"], model["ready"], model["stage"], model["progress"]) == (
        "tiny",
        False,
        "loading weights",
        0.25,
    )
    assert b'penstock_workers{model="tiny",state="loading"} 1.0' in fetch(running, "/metrics")[2]


def test_metrics_and_status_are_for_neighbours_that_are_trusted(gateway, kit):
    for path in ("/metrics", "/status.json"):
        assert fetch(gateway, path)[0] == 200
        assert fetch(gateway, path, X_Forwarded_For="10.0.0.1")[0] == 401
    status = json.loads(fetch(gateway, "/status.json")[2])
    assert status["models"][0]["name"] == "tiny"
    assert status["auth"] is True
    assert fetch(gateway, "/metrics")[1]["content-type"].startswith("text/plain; version=0.0.4")


def test_the_status_does_not_cost_a_page_of_metrics(start, kit):
    running = start(kit.replace(kit.make_config(), prices={"accelerators": {"tiny": 3600.0}}))
    rendered = running.gateway._inspect.rendered
    running.wait_until(lambda: cost_accounts(rendered()))  # Since the worker was seen.
    (whole,) = cost_accounts(running.call(rendered))
    asked = list[int]()
    running.gateway._inspect.rendered = lambda: asked.append(1) or b""
    costs = json.loads(fetch(running, "/status.json")[2])["costs"]
    assert asked == []
    assert [each["model"] for each in costs] == [whole.model] == ["tiny"]
    assert costs[0]["bill"] >= whole.bill


def test_who_is_local():
    assert is_local("127.0.0.1", {})
    assert is_local("127.8.8.8", {})
    assert is_local("::1", {})
    assert is_local("local", {})
    assert not is_local("10.0.0.1", {})
    assert not is_local("unknown", {})
    for name in (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"):
        assert not is_local("127.0.0.1", {name: b"x"})


def test_requests_are_counted_and_logged(start, kit):
    running = start()
    raw = kit.Raw(running)
    raw.send(kit.post("/v1/chat/completions", kit.chat(max_tokens=3), "Connection: close"))
    raw.read_all()
    raw.close()
    text = fetch(running, "/metrics")[2].decode()
    for line in (
        'penstock_requests_total{endpoint="chat",model="tiny",outcome="length"} 1.0',
        'penstock_prompt_tokens_total{model="tiny"} 23.0',
        'penstock_generated_tokens_total{model="tiny"} 3.0',
        'penstock_request_ttft_seconds_count{model="tiny"} 1.0',
        'penstock_request_tpot_seconds_count{model="tiny"} 1.0',
        'penstock_http_responses_total{code="200"} 1.0',
    ):
        assert line in text
    (line,) = [line for line in running.log_text.getvalue().splitlines() if "POST" in line]
    assert "POST /v1/chat/completions 200" in line
    assert "model=tiny outcome=length prompt_tokens=23 cached_tokens=0 generated_tokens=3" in line
