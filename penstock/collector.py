"""The garbage collector during a run: what a simulation makes it keeps, or lets go of without cycles.

By default the collector looks at everything young after every 700 new objects, and at everything there is when a quarter more of it is new: a tenth of the time of
a run, and it finds next to nothing. Memory stays bounded: what does make cycles (errors with their tracebacks) is still collected, later.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

_YOUNG = 200_000
"""New objects between two looks at the young ones; an object takes some 100 bytes."""
_MIDDLE, _OLD = 20, 20


@contextmanager
def calm() -> Generator[None]:
    """Let the collector look rarely, and never at what is there already. As before at the end."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
