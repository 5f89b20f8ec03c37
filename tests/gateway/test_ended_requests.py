"""What an ended request leaves behind: nothing that only the collector of cycles could free, and one end."""

import gc
import re
import threading

import msgspec

from penstock.config.routing import ModelRoute, RoutingConfig
from penstock.gateway.http.connection import Connection
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.relay.reply import Reply
from penstock.policy.terms import QueueTerms


def test_no_cycles(start, kit):
    def script(request):
        return iter(["Hel", "lo"])

    running = start(kit.make_config(), script)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for stream in (False, True):
            with kit.openai_client(running) as client:
                for _ in range(3):
                    answer = client.chat.completions.create(
                        model="tiny", messages=[{"role": "user", "content": "hi"}], stream=stream
                    )
                    if stream:
                        assert list(answer)
        gc.collect()
        left = [type(each).__name__ for each in gc.garbage if isinstance(each, (Connection, Exchange, Reply))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not left


def test_a_client_that_leaves_while_its_request_moves_to_another_model(start, kit):
    """The first model's reply was never accepted, and the second one's is not there yet."""
    config = msgspec.structs.replace(
        kit.make_config(),
        routing=RoutingConfig(models=(ModelRoute(model="tiny", fallback="small"),)),
        queue=QueueTerms(worker_credit=0, no_worker_wait_s=0),
    )
    running = start(config, small=True)
    encode, calls = running.tokenizer.encode, []
    second, may_go_on = threading.Event(), threading.Event()

    def held(text, **options):
        calls.append(text)
        if len(calls) == 2:
            second.set()
            assert may_go_on.wait(10)
        return encode(text, **options)

    running.tokenizer.encode = held
    running.call(running.backend.lose_worker)
    body = {"model": "tiny", "prompt": "x" * 20_000, "max_tokens": 4}  # So long that a thread tokenizes it.
    raw = kit.Raw(running).send(kit.post("/v1/completions", body))
    assert second.wait(10)
    raw.close()
    running.wait_until(lambda: " 499 " in running.log_text.getvalue())
    may_go_on.set()
    with kit.openai_client(running) as client:
        answer = client.completions.create(model="small", prompt="hi", max_tokens=2)
    assert answer.usage.completion_tokens == 2
    running.wait_until(lambda: " 200 " in running.log_text.getvalue())
    lines = running.log_text.getvalue().splitlines()
    assert [re.findall(r" (499|200) .*model=(\w+) outcome=(\w+)", line) for line in lines] == [
        [("499", "small", "abort")],
        [("200", "small", "length")],
    ], lines
    running.wait_until(lambda: running.gateway.num_accepted == 0)
