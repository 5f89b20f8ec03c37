"""What an ended request leaves behind: nothing that only the collector of cycles could free."""

import gc

from penstock.gateway.http.connection import Connection
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.relay.reply import Reply


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
