import gc
import sys

from penstock.gc_tuning import rare_gc, tune_server


def test_a_server_lets_no_thread_keep_the_interpreter_for_long_and_collects_rarely() -> None:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        tune_server()
        assert sys.getswitchinterval() <= 0.001 < interval
        assert gc.get_threshold() > thresholds
        assert gc.get_freeze_count() > 0
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def test_what_a_simulation_changes_is_as_before_at_its_end() -> None:
    thresholds = gc.get_threshold()
    with rare_gc():
        assert gc.get_threshold() > thresholds
    assert (gc.get_threshold(), gc.get_freeze_count()) == (thresholds, 0)
