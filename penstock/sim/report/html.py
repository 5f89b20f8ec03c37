"""The report as one HTML page: tables and plots, nothing fetched, light and dark."""

from collections.abc import Sequence
from html import escape

from penstock.sim.report.compare import Difference
from penstock.sim.report.figures import Figures
from penstock.sim.report.plots import Axes, Series, bars, lines
from penstock.sim.traffic.request import RequestRecord

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
            Axes(title="Requests per second, by outcome", x=time, y="requests/s"),
            [
                Series("came", [(w.begins_s, w.arrived / width) for w in windows], 0),
                Series("met both promises", [(w.begins_s, w.good / width) for w in windows], 2),
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
        title="Share of each tenant's requests that met both promises",
        x="the tenants with most requests",
        y="share",
        y_max=1.0,
    )
    return [*plots, bars(axes, groups, ["good"])]


def _shares(values: list[float]) -> list[tuple[float, float]]:
    values.sort()
    count = len(values)
    places = sorted({min(count - 1, count * i // CDF_POINTS) for i in range(CDF_POINTS + 1)} if count else ())
    return [(max(values[place], 0.1), (place + 1) / count) for place in places]


def _cards(figures: Figures) -> str:
    cards = [
        (f"{figures.attainment:.1%}", f"met both promises (objective: {figures.objective.share:.0%})"),
        (f"{figures.goodput_rps:.3g}/s", "goodput: requests that met both promises"),
        (f"{figures.goodput_tps:,.0f}/s", "their output tokens"),
        (f"{figures.throughput_tps:,.0f}/s", "throughput: all output tokens"),
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
