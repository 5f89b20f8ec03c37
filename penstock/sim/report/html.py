"""The report as one HTML page: tables and plots, nothing fetched, light and dark.

Plots as SVG, made by hand: lines, bars and steps with axes. They follow the reader's light or dark scheme.

A plot is a string that stands alone as a file and also inside of a page. No scripts, nothing fetched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from penstock.sim.report.compare import Difference
from penstock.sim.report.figures import Figures
from penstock.sim.traffic.request import RequestRecord

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 42, 40
COLOURS = 6
STYLE = """\
.plot{--ink:#1f2933;--faint:#d5dbe1;--soft:#616e7c;--c0:#2166ac;--c1:#d6604d;--c2:#1b7837;--c3:#9970ab;--c4:#bf812d;--c5:#35978f;\
font:12px system-ui,sans-serif}
@media(prefers-color-scheme:dark){.plot{--ink:#e4e7eb;--faint:#39424d;--soft:#9aa5b1;--c0:#74a9e0;--c1:#f4937f;--c2:#6cc38a;\
--c3:#c7a2db;--c4:#e0b25f;--c5:#6fcfc3}}
.plot text{fill:var(--soft)}.plot .title{fill:var(--ink);font-weight:600}.plot .grid{stroke:var(--faint)}
.plot .mark{stroke:var(--soft);stroke-dasharray:5 4}"""


@dataclass(slots=True, frozen=True)
class Series:
    """One line: points by rising x."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class Axes:
    """What a plot is of."""

    title: str
    x: str
    y: str
    y_max: float = 0.0
    """0: as high as the data."""
    mark: tuple[float, str] | None = None
    """A level that is drawn across, and its name."""
    log_x: bool = False


def lines(axes: Axes, series: Sequence[Series]) -> str:
    """Lines over a common x axis."""
    points = [point for each in series for point in each.points] or [(0.0, 0.0)]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    if axes.log_x:
        low = max(low, 1e-3)
        high = max(high, low * 1.01)
    top = axes.y_max or max([y for _, y in points] + ([axes.mark[0]] if axes.mark else []))
    scale = _Scale(low, high, top, log_x=axes.log_x)
    body = [_frame(axes, scale)]
    for each in series:
        drawn = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in each.points)
        body.append(
            f'<polyline points="{drawn}" fill="none" stroke="var(--c{each.colour % COLOURS})" '
            f'stroke-width="1.8" '
            'stroke-linejoin="round"/>'
        )
    return _svg(axes, [*body, _legend([(each.name, each.colour) for each in series])])


def bars(axes: Axes, groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[str]) -> str:
    """A group of bars per label, one bar per name."""
    top = axes.y_max or max([value for _, values in groups for value in values] + [1e-9])
    scale = _Scale(0, max(1, len(groups)), top)
    body = [_frame(axes, scale, ticks=False)]
    width = (scale.x(1) - scale.x(0)) * 0.8 / max(1, len(names))
    for place, (label, values) in enumerate(groups):
        left = scale.x(place) + (scale.x(1) - scale.x(0)) * 0.1
        for index, value in enumerate(values):
            y = scale.y(value)
            body.append(
                f'<rect x="{left + index * width:.1f}" y="{y:.1f}" width="{max(1.0, width - 1.5):.1f}" '
                f'height="{max(0.0, HEIGHT - BOTTOM - y):.1f}" fill="var(--c{index % COLOURS})"/>'
            )
        middle = scale.x(place + 0.5)
        body.append(
            f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{escape(label)}</text>'
        )
    return _svg(
        axes, [*body, _legend(list(zip(names, range(len(names)), strict=True)) if len(names) > 1 else [])]
    )


class _Scale:
    def __init__(self, low: float, high: float, top: float, *, log_x: bool = False) -> None:
        self.low, self.high, self.log_x = low, high if high > low else low + 1, log_x
        self.step = nice_step(top or 1.0, 4)
        self.top = self.step * -(-(top or 1.0) // self.step)

    def x(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        if self.log_x:
            share = log10(max(value, self.low) / self.low) / log10(self.high / self.low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - min(value, self.top) / self.top * (HEIGHT - TOP - BOTTOM)

    def x_ticks(self) -> list[float]:
        if self.log_x:
            first, last = floor(log10(self.low)), floor(log10(self.high))
            ticks = [10.0**power for power in range(first, last + 1)]
            return [tick for tick in ticks if tick >= self.low * 0.999]
        step = nice_step(self.high - self.low, 6)
        first = -(-self.low // step)
        return [step * (first + i) for i in range(int((self.high - step * first) / step + 1e-9) + 1)]


def nice_step(span: float, about: int) -> float:
    """A step of 1, 2 or 5 times a power of ten that cuts the span into about so many."""
    raw = span / about
    power = 10.0 ** floor(log10(raw))
    return power * next(step for step in (1, 2, 5, 10) if raw <= step * power * (1 + 1e-9))


def short(value: float) -> str:
    """A number for an axis: 1500 is 1.5k."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def _frame(axes: Axes, scale: _Scale, *, ticks: bool = True) -> str:
    parts: list[str] = []
    for i in range(round(scale.top / scale.step) + 1):
        value = i * scale.step
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in scale.x_ticks() if ticks else ():
        x = scale.x(value)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{short(value)}</text>'
        )
    if axes.mark is not None:
        y = scale.y(axes.mark[0])
        parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT - 2}" y="{y - 4:.1f}" text-anchor="end">{escape(axes.mark[1])}</text>'
        )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 '
        f'{middle})">{escape(axes.y)}</text>'
    )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(axes.x)}</text>'
    )
    return "".join(parts)


def _legend(names: Sequence[tuple[str, int]]) -> str:
    parts, x = list[str](), float(LEFT)
    for name, colour in names:
        parts.append(
            f'<rect x="{x:.0f}" y="25" width="10" height="10" rx="2" fill="var(--c{colour % COLOURS})"/>'
        )
        parts.append(f'<text x="{x + 14:.0f}" y="34">{escape(name)}</text>')
        x += 28 + 6.6 * len(name)
    return "".join(parts)


def _svg(axes: Axes, body: Sequence[str]) -> str:
    return (
        f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(axes.title)}"><style>{STYLE}</style>'
        f'<text class="title" x="{LEFT}" y="17">{escape(axes.title)}</text>{"".join(body)}</svg>'
    )


CDF_POINTS = 200
TENANTS_SHOWN = 12

PAGE = """\
<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" \
content="width=device-width,initial-scale=1">
<title>{title}</title><style>
:root{{color-scheme:light \
dark;--ink:#1f2933;--soft:#616e7c;--line:#d5dbe1;--back:#fff;--card:#f7f9fb;--good:#1b7837;--bad:#b2182b}}
@media(prefers-color-scheme:dark){{:root{{--ink:#e4e7eb;--soft:#9aa5b1;--line:#39424d;--back:#161b22;--card:#1d242d;--good:#6cc38a;--bad:#f4937f}}}}
body{{font:15px/1.5 \
system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:1360px;margin:2rem auto;padding:0 \
1rem}}
h1{{font-size:1.5rem;margin:0 0 .2rem}}h2{{font-size:1.1rem;margin:2rem 0 .6rem}}p{{margin:.3rem \
0;color:var(--soft);max-width:80ch}}
.cards{{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.7rem;margin:1.2rem 0}}
.card{{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.6rem .8rem}}
.card b{{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}}.card \
span{{color:var(--soft);font-size:.85rem}}
.plots{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:1rem}}
.plots svg{{width:100%;height:auto;background:var(--card);border:1px solid var(--line);border-radius:8px}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}th,td{{padding:.25rem \
.8rem;border-bottom:1px solid var(--line);text-align:right}}
th{{color:var(--soft);font-weight:500}}th:first-child,td:first-child{{text-align:left}}.good{{color:var(--good)}}.bad{{color:var(--bad)}}
.scroll{{overflow-x:auto}}
</style></head><body>{body}</body></html>
"""


def report_page(
    title: str, question: str, figures: Figures, records: Sequence[RequestRecord], notes: Sequence[str] = ()
) -> str:
    """One run's page. `notes` are facts about it (seed, fleet, verdicts)."""
    facts = "".join(f"<p>{escape(note)}</p>" for note in notes)
    body = (
        f"<h1>{escape(title)}</h1><p>{escape(question)}</p>{facts}{_cards(figures)}"
        f'<div class="plots">{"".join(run_plots(figures, records))}</div>'
        f"{_latencies(figures)}{_tenants(figures)}{_ends(figures)}"
    )
    return PAGE.format(title=escape(title), body=body)


def compare_page(title: str, names: tuple[str, str], found: Sequence[Difference], num_seeds: int) -> str:
    """The page of a comparison."""
    rows = "".join(
        f"<tr><td>{escape(each.words)}</td><td>{each.a:.4g}</td><td>{each.b:.4g}</td><td>{each.difference:+.4g}</td>"
        f'<td>{each.low:+.4g} to {each.high:+.4g}</td><td class="{_class(each)}">{each.verdict}</td></tr>'
        for each in found
    )
    body = (
        f"<h1>{escape(title)}</h1><p>A is {escape(names[0])}, B is {escape(names[1])}. {num_seeds} seeds, "
        f"the same for both; "
        "means over the seeds, and the 95 % interval of the paired difference B - A (Student's t).</p>"
        '<div class="scroll"><table><tr><th>figure</th><th>A</th><th>B</th><th>B - A</th><th>95 % '
        "interval</th><th>B is</th></tr>"
        f"{rows}</table></div>"
    )
    return PAGE.format(title=escape(title), body=body)


def run_plots(figures: Figures, records: Sequence[RequestRecord]) -> list[str]:
    """The plots of one run, each an SVG that stands alone."""
    windows, objective = figures.windows, figures.objective
    width = windows[1].begins_s if len(windows) > 1 else figures.seconds
    target = (objective.ttft_ms, f"promised: {objective.ttft_ms:g} ms")
    seen = [window for window in windows if window.ttft_p95_ms]
    time = "virtual seconds"
    plots = [
        lines(
            Axes(title="Requests per second, by what became of them", x=time, y="requests/s"),
            [
                Series("came", [(w.begins_s, w.arrived / width) for w in windows], 0),
                Series("good", [(w.begins_s, w.good / width) for w in windows], 2),
                Series("refused or dropped", [(w.begins_s, w.refused / width) for w in windows], 1),
            ],
        ),
        lines(
            Axes(title="Time to first token", x=time, y="ms", mark=target),
            [
                Series("p95", [(w.begins_s, w.ttft_p95_ms) for w in seen], 1),
                Series("p50", [(w.begins_s, w.ttft_p50_ms) for w in seen], 0),
            ],
        ),
        lines(
            Axes(title="Requests waiting in the gateway", x=time, y="requests"),
            [Series("waiting", [(w.begins_s, float(w.queued)) for w in windows], 3)],
        ),
        lines(
            Axes(title="Output tokens per second", x=time, y="tokens/s"),
            [Series("tokens", [(w.begins_s, w.output_tokens / width) for w in windows], 5)],
        ),
        lines(
            Axes(title="Requests with their first token within", x="ms", y="share", y_max=1.0, log_x=True),
            [Series("all", _shares([r.ttft_ns / 1e6 for r in records if r.first_ns >= 0]), 0)],
        ),
    ]
    shown = sorted(figures.tenants.items(), key=lambda item: -item[1].requests)[:TENANTS_SHOWN]
    groups = [(name, [each.good / each.requests]) for name, each in shown]
    axes = Axes(
        title="Good share of each tenant's requests", x="the tenants with most requests", y="share", y_max=1.0
    )
    return [*plots, bars(axes, groups, ["good"])]


def _shares(values: list[float]) -> list[tuple[float, float]]:
    values.sort()
    count = len(values)
    places = sorted({min(count - 1, count * i // CDF_POINTS) for i in range(CDF_POINTS + 1)} if count else ())
    return [(max(values[place], 0.1), (place + 1) / count) for place in places]


def _cards(figures: Figures) -> str:
    cards = [
        (f"{figures.attainment:.1%}", f"within the objective (promised: {figures.objective.share:.0%})"),
        (f"{figures.goodput_rps:.3g}/s", "good requests"),
        (f"{figures.throughput_tps:,.0f}/s", "output tokens"),
        (f"{figures.ttft_ms.p95:,.0f} ms", "TTFT p95"),
        (f"{figures.tpot_ms.p95:,.1f} ms", "TPOT p95"),
        (f"{figures.hit_rate:.1%}", "prefix hit rate"),
        (f"{figures.jain:.3f}", "fairness (Jain, 1 is fair)"),
        (f"{figures.cost_per_million:,.2f}", "cost per 1M output tokens"),
        (f"{figures.slo_minutes_lost:.1f}", "SLO minutes lost"),
        (f"{figures.utilisation:.0%}", "of workers' time in steps"),
    ]
    return '<div class="cards">' + "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(words)}</span></div>' for value,
        words in cards
    ) + "</div>"  # fmt: skip


def _latencies(figures: Figures) -> str:
    rows = "".join(
        f"<tr><td>{name}</td><td>{d.count:,}</td><td>{d.p50:,.1f}</td><td>{d.p90:,.1f}</td><td>{d.p95:,.1f}</td>"
        f"<td>{d.p99:,.1f}</td><td>{d.max:,.1f}</td></tr>"
        for name, d in (
            ("time to first token", figures.ttft_ms), ("time per output token", figures.tpot_ms),
            ("end to end", figures.e2e_ms), ("in the queue", figures.queue_ms),
        )
    )  # fmt: skip
    columns = ("milliseconds", "requests", "p50", "p90", "p95", "p99", "max")
    head = f"<tr>{''.join(f'<th>{column}</th>' for column in columns)}</tr>"
    return f'<h2>Latency</h2><div class="scroll"><table>{head}{rows}</table></div>'


def _tenants(figures: Figures) -> str:
    shown = sorted(figures.tenants.items(), key=lambda item: -item[1].requests)[:TENANTS_SHOWN]
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{t.requests:,}</td><td>{t.good / t.requests:.1%}</td>"
        f"<td>{t.ttft_ms.p95:,.0f}</td>"
        f"<td>{t.served:,.0f}</td><td>{t.wanted:,.0f}</td></tr>"
        for name, t in shown
    )
    head = (
        "<tr><th>tenant</th><th>requests</th><th>good</th><th>TTFT p95 ms</th><th>served "
        "tokens</th><th>wanted</th></tr>"
    )
    return f'<h2>Tenants</h2><div class="scroll"><table>{head}{rows}</table></div>'


def _ends(figures: Figures) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{count:,}</td></tr>"
        for name, count in [
            *figures.outcomes.items(),
            *((f"because of: {k}", v) for k, v in figures.reasons.items()),
        ]
    )
    return f'<h2>How requests ended</h2><div class="scroll"><table>{rows}</table></div>'


def _class(each: Difference) -> str:
    return {"better": "good", "worse": "bad"}.get(each.verdict, "")
