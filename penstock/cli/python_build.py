"""How this Python was compiled: one without profile-guided optimization runs the gateway slower, and nobody
sees it.
"""

import sys
import sysconfig

PLAIN = "plain"
PLAIN_COST = "takes about 1.15 times the CPU for a gateway's work"
"""Python without profile-guided optimization, beside Debian's (docs/bench-results.md)."""
REMEDY = "use your distribution's Python or python.org's; pyenv: PYTHON_CONFIGURE_OPTS=--enable-optimizations"


def python_build(config: str | None = None, flags: str | None = None, prefix: str = sys.base_prefix) -> str:
    """Of "PGO" and "LTO" what the build tells, joined by "+"; "plain" if neither; "" if it does not tell.

    Debian and others optimize in their own packaging and take the flags out of what Python knows of its
    build, so one that is installed under /usr without them is not called plain.
    """
    if config is None:
        config = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    if flags is None:
        names = ("PY_CFLAGS", "PY_CORE_CFLAGS", "PY_LDFLAGS", "PY_CORE_LDFLAGS")
        flags = " ".join(str(sysconfig.get_config_var(name) or "") for name in names)
    profiled = any(mark in flags for mark in ("-fprofile-use", "-fprofile-instr-use"))
    found = {
        "PGO": profiled or "--enable-optimizations" in config,
        "LTO": "-flto" in flags or "--with-lto" in config,
    }
    if any(found.values()):
        return "+".join(name for name, is_so in found.items() if is_so)
    return PLAIN if config and prefix != "/usr" else ""


def python_advice(build: str) -> str:
    """The cost of a build that is known to be slow, and what to install; else nothing."""
    return f"built without profile-guided optimization: {PLAIN_COST}; {REMEDY}" if build == PLAIN else ""
