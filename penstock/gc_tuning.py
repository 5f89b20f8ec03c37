"""Python's collector of cycles, for programs that hardly make any, and how long its threads may keep the
interpreter.

By default it looks at everything young after every 700 new objects, and at everything there is when a quarter
more of it is new: a tenth of a simulation's time, a twenty-fifth of the gateway's, and for ten thousand
streams a pause of a tenth of a second; and it finds next to nothing. Memory stays bounded: what does make
cycles (errors with their tracebacks) is still collected, later.
"""

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager

_SIMULATED = (200_000, 20, 20)
"""New objects between two looks at the young ones, such looks between two at the middle ones, and so on; an
object takes some 100 bytes."""
_SERVED = (5_000, 20, 1000)
"""Of ten thousand streams there are a million objects, and a look at all of them holds everybody up for half
a second."""


_SWITCH_S = 0.0005
"""By default a thread that works in Python gives the interpreter up after 5 ms: so long would a request wait
whose event loop wakes while the ledger's delivery works."""


def tune_server() -> None:
    """The objects of now stay as long as the process: never look at it again, and rarely at what comes. And
    no thread keeps the event loop waiting.

    For servers that have started.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_SERVED)


@contextmanager
def rare_gc() -> Generator[None]:
    """Let the collector look rarely, and never at what is there already. As before at the end."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_SIMULATED)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
