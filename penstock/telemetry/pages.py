"""The sum of several processes' metrics, from their texts (Prometheus' exposition format 0.0.4).

Counters, histograms and the gauges of what each process has for itself are added. What all of them tell of
one and the same engine (`Metric.shared`) is taken once: the largest, for one of them may just have lost sight
of it.
"""

from collections.abc import Collection, Sequence

from penstock.telemetry.catalog import CATALOG

SHARED = frozenset(metric.name.encode() for metric in CATALOG if metric.shared)

Family = tuple[list[bytes], dict[bytes, float], bool]
"""Comment lines, values by series, and whether it is a gauge."""


def merged(texts: Sequence[bytes], shared: Collection[bytes] = SHARED) -> bytes:
    """One text for all; families and series in the order in which they are first seen."""
    families: dict[bytes, Family] = {}
    for text in texts:
        for name, (comments, values, is_gauge) in parsed(text).items():
            _, total, _ = families.setdefault(name, (comments, {}, is_gauge))
            for series, value in values.items():
                known = total.get(series, 0.0)
                total[series] = max(known, value) if name in shared else known + value
    return written(families)


def lasting(text: bytes, shared: Collection[bytes] = SHARED) -> bytes:
    """What stays true of a process that has ended: its own counters and histograms."""
    families = parsed(text)
    return written({n: each for n, each in families.items() if not each[2] and n not in shared})


def parsed(text: bytes) -> dict[bytes, Family]:
    """A page by family."""
    families: dict[bytes, Family] = {}
    comments: list[bytes] = []
    values: dict[bytes, float] = {}
    for line in text.splitlines():
        if line.startswith(b"# TYPE "):
            _, _, name, kind = line.split()
            comments, values = [*comments, line], {}
            families[name] = (comments, values, kind == b"gauge")
        elif line.startswith(b"#"):
            comments = [line]
        elif line:
            series, _, value = line.rpartition(b" ")
            values[series] = float(value)
    return families


def written(families: dict[bytes, Family]) -> bytes:
    """The page of these families."""
    lines: list[bytes] = []
    for comments, values, _ in families.values():
        lines += comments
        lines += [b"%b %b" % (series, repr(value).encode()) for series, value in values.items()]
    return b"\n".join([*lines, b""])


def label_of(series: bytes, label: bytes) -> bytes:
    """A label's value as it is written, escapes and all."""
    _, found, rest = series.partition(b'%b="' % label)
    end = 0
    while found and end < len(rest) and rest[end : end + 1] != b'"':
        end += 2 if rest[end : end + 1] == b"\\" else 1
    return rest[:end]
