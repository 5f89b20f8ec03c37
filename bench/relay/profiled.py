"""`penstock` under Python's profiler: python bench/relay/profiled.py OUT ARGUMENTS...

The profile of what runs between SIGUSR1 and SIGUSR2, in CPU time of the main thread, is written to OUT; for
bench/relay/stages.py.
"""

import cProfile
import signal
import sys
import time
from pathlib import Path

from penstock.cli.main import main

out = Path(sys.argv.pop(1))
profile = cProfile.Profile(time.thread_time)


def stop(*_: object) -> None:
    """Write it, under its name only once it is whole."""
    profile.disable()
    profile.dump_stats(out.with_suffix(".part"))
    out.with_suffix(".part").rename(out)


signal.signal(signal.SIGUSR1, lambda *_: profile.enable())
signal.signal(signal.SIGUSR2, stop)
sys.exit(main())
