// What was recorded elsewhere: reports of `penstock simulate --json` and results of benches, from a file of the reader's.
import { signal, useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { Chart, LOG_MS, SECONDS } from "./chart";
import * as format from "./format";
import { Empty, Facts, Page, Problem, Select } from "./ui";

const FILE_BYTES_MAX = 32 * 1024 * 1024;
const ROWS_MAX = 300;
const COLUMNS_MAX = 24;
const DEPTH_MAX = 6;
const TENANTS_MAX = 12;

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };
type Row = { [name: string]: Json };

interface Spread {
  count: number;
  p50: number;
  p90: number;
  p95: number;
  p99: number;
  max: number;
}

interface Finding {
  words: string;
  value: number;
  bound: number;
  at_most: boolean;
  passed: boolean;
}

interface Tenant {
  requests: number;
  good: number;
  served: number;
  wanted: number;
  ttft_ms: Spread;
}

interface Figures {
  seconds: number;
  requests: number;
  outcomes: Record<string, number>;
  reasons: Record<string, number>;
  attainment: number;
  goodput_rps: number;
  goodput_tps: number;
  throughput_tps: number;
  ttft_ms: Spread;
  tpot_ms: Spread;
  e2e_ms: Spread;
  queue_ms: Spread;
  hit_rate: number;
  jain: number;
  cost_per_million: number;
  utilisation: number;
  slo_minutes_lost: number;
  objective: { ttft_ms: number; tpot_ms: number; share: number };
  tenants: Record<string, Tenant>;
  windows: { begins_s: number; arrived: number; good: number; refused: number; ttft_p50_ms: number; ttft_p95_ms: number; queued: number; output_tokens: number }[];
}

/** One run of `penstock simulate`. */
interface Run {
  schema: string;
  scenario: string;
  question?: string;
  answer?: string;
  workers?: string;
  seed: number;
  digest: string;
  passed: boolean;
  findings: Finding[];
  figures: Figures;
  ttft_shares?: [number, number][];
}

/** A line of `penstock simulate --compare`. */
interface Difference {
  sides?: [string, string];
  seeds?: number;
  words: string;
  a: number;
  b: number;
  difference: number;
  /** null: one seed has no interval. */
  low: number | null;
  high: number | null;
  verdict: string;
}

export interface Opened {
  name: string;
  content: Json;
}

const opened = signal<Opened | null>(null);
const problem = signal("");

const number = (value: number): string => (Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4))));

async function open(file: File | undefined): Promise<void> {
  if (!file) return;
  problem.value = "";
  try {
    if (file.size > FILE_BYTES_MAX) throw new Error(`it has more than ${FILE_BYTES_MAX >> 20} MiB`);
    opened.value = { name: file.name, content: JSON.parse(await file.text()) as Json };
  } catch (error) {
    problem.value = `${file.name} cannot be opened: ${(error as Error).message}`;
  }
}

function Bars({ rows, label }: { rows: [string, number, string][]; label: string }): JSX.Element {
  const most = Math.max(1e-12, ...rows.map(([, value]) => Math.abs(value)));
  return (
    <ul class="bars" aria-label={label}>
      {rows.map(([name, value, text], i) => (
        <li key={i}>
          <span class="bar-name" title={name}>
            {name}
          </span>
          <span class="bar-track" aria-hidden="true">
            <i class="b-prefill" style={{ width: `${(Math.abs(value) / most) * 100}%` }} />
          </span>
          <b class="num">{text}</b>
        </li>
      ))}
    </ul>
  );
}

function Table({ head, rows, label }: { head: string[]; rows: JSX.Element[]; label: string }): JSX.Element {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={label}>
      <table>
        <thead>
          <tr>
            {head.map((each, i) => (
              <th scope="col" key={i} class={i ? "right" : ""}>
                {each}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{rows}</tbody>
      </table>
    </div>
  );
}

function Numbers({ name, values }: { name: string; values: string[] }): JSX.Element {
  return (
    <tr>
      <th scope="row">{name}</th>
      {values.map((each, i) => (
        <td key={i} class="right num">
          {each}
        </td>
      ))}
    </tr>
  );
}

function RunCharts({ figures, shares }: { figures: Figures; shares: [number, number][] }): JSX.Element {
  const { windows, objective } = figures;
  const width = windows.length > 1 ? windows[1]!.begins_s - windows[0]!.begins_s : figures.seconds;
  const time = { times: windows.map((each) => each.begins_s * 1000), stepMs: width * 1000, axis: SECONDS };
  const seen = (value: number): number | null => value || null;
  const tenants = Object.entries(figures.tenants)
    .sort(([, a], [, b]) => b.requests - a.requests)
    .slice(0, TENANTS_MAX);
  return (
    <div class="charts">
      <Chart
        title="Requests" hint="per virtual second, by when they came" {...time} unit={format.count}
        lines={[
          { name: "came", color: "prefill", values: windows.map((each) => each.arrived / width) },
          { name: "met both promises", color: "decode", values: windows.map((each) => each.good / width) },
          { name: "refused or dropped", color: "bad", values: windows.map((each) => each.refused / width) },
        ]}
      />
      <Chart
        title="Time to first token" {...time} unit={format.ms} promise={{ value: objective.ttft_ms, label: `promised ${format.ms(objective.ttft_ms)}` }}
        lines={[
          { name: "p95", color: "queue", values: windows.map((each) => seen(each.ttft_p95_ms)) },
          { name: "p50", color: "prefill", values: windows.map((each) => seen(each.ttft_p50_ms)) },
        ]}
      />
      <Chart title="Waiting" hint="requests in gateways' queues" {...time} unit={format.count} lines={[{ name: "waiting", color: "queue", kind: "area", values: windows.map((each) => each.queued) }]} />
      <Chart title="Output" hint="tokens per virtual second" {...time} unit={format.count} lines={[{ name: "tokens", color: "decode", values: windows.map((each) => each.output_tokens / width) }]} />
      {shares.length > 1 && <Shares shares={shares} promisedMs={objective.ttft_ms} />}
      <figure class="chart">
        <figcaption>
          <span class="chart-title">Requests that met both promises</span>
          <span class="soft">the tenants with most requests</span>
        </figcaption>
        <Bars label="Share of each tenant's requests that met both promises" rows={tenants.map(([name, each]) => [name, each.good / each.requests, format.percent(each.good / each.requests)])} />
      </figure>
    </div>
  );
}

const SHARE_STEPS = 160;

/** Which share of requests had their first token within which time, on a logarithmic axis. */
function Shares({ shares, promisedMs }: { shares: [number, number][]; promisedMs: number }): JSX.Element {
  const from = Math.log10(shares[0]![0]);
  const step = Math.max(1e-3, (Math.log10(shares[shares.length - 1]![0]) - from) / SHARE_STEPS);
  const moments = Array.from({ length: SHARE_STEPS + 1 }, (_, i) => from + i * step);
  const values = moments.map((at) => shares.findLast(([ms]) => Math.log10(ms) <= at + 1e-9)?.[1] ?? 0);
  const kept = values[moments.findLastIndex((at) => at <= Math.log10(Math.max(promisedMs, 1e-3)))];
  return (
    <Chart
      title="First token within" hint="share of requests that had one" headline={kept === undefined ? undefined : `${format.percent(kept)} in ${format.ms(promisedMs)}`}
      times={moments.map((at) => at * 1000)} stepMs={step * 1000} axis={LOG_MS} unit={format.percent} min={1} lines={[{ name: "share", color: "kv", values }]}
    />
  );
}

function OneRun({ run }: { run: Run }): JSX.Element {
  const { figures, findings } = run;
  const kpis: [string, string, string][] = [
    ["Met both promises", format.percent(figures.attainment), `objective ${format.percent(figures.objective.share)}`],
    ["Goodput", `${number(figures.goodput_rps)}/s`, `${format.count(figures.goodput_tps)} tokens/s`],
    ["Throughput", format.count(figures.throughput_tps), "output tokens/s"],
    ["TTFT p95", format.ms(figures.ttft_ms.p95), `p50 ${format.ms(figures.ttft_ms.p50)}`],
    ["TPOT p95", format.ms(figures.tpot_ms.p95), `p50 ${format.ms(figures.tpot_ms.p50)}`],
    ["Prefix hits", format.percent(figures.hit_rate), "of prompt tokens"],
    ["Fairness", figures.jain.toFixed(3), "Jain, 1 is fair"],
    ["Utilisation", format.percent(figures.utilisation), "of workers' time"],
    ["Cost", number(figures.cost_per_million), "per 1M output tokens"],
    ["Lost", `${figures.slo_minutes_lost.toFixed(1)} min`, "of the objective"],
  ];
  const latencies: [string, Spread][] = [
    ["Time to first token", figures.ttft_ms],
    ["Time per output token", figures.tpot_ms],
    ["End to end", figures.e2e_ms],
    ["In the queue", figures.queue_ms],
  ];
  const tenants = Object.entries(figures.tenants).sort(([, a], [, b]) => b.requests - a.requests);
  return (
    <>
      {run.question && <p>{run.question}</p>}
      {run.answer && <p class="soft">{run.answer}</p>}
      <p class="soft small">
        {run.workers && <>Workers at the start: {run.workers}. </>}
        Seed {run.seed}, hash <code>{run.digest}</code>.
      </p>
      <section class="kpis" aria-label="Figures">
        {kpis.map(([name, value, note]) => (
          <div class="kpi" key={name}>
            <span class="kpi-name">{name}</span>
            <span class="kpi-value num">{value}</span>
            <span class="kpi-note num">{note}</span>
          </div>
        ))}
      </section>
      {findings.length > 0 && (
        <Table
          label="Criteria" head={["Criterion", "Found", "Bound", ""]}
          rows={findings.map((each, i) => (
            <tr key={i}>
              <th scope="row" class="wrap">{each.words}</th>
              <td class="right num">{number(each.value)}</td>
              <td class="right num">{`${each.at_most ? "≤" : "≥"} ${number(each.bound)}`}</td>
              <td class="right">
                <span class={`state ${each.passed ? "good" : "bad"}`}>
                  <i aria-hidden="true" />
                  {each.passed ? "passes" : "fails"}
                </span>
              </td>
            </tr>
          ))}
        />
      )}
      <RunCharts figures={figures} shares={run.ttft_shares ?? []} />
      <Table label="Latency" head={["Milliseconds", "Requests", "p50", "p90", "p95", "p99", "Max"]} rows={latencies.map(([name, each]) => <Numbers key={name} name={name} values={[each.count, each.p50, each.p90, each.p95, each.p99, each.max].map(number)} />)} />
      <Table
        label="Tenants" head={["Tenant", "Requests", "Met both", "TTFT p95 ms", "Served tokens", "Wanted"]}
        rows={tenants.slice(0, TENANTS_MAX).map(([name, each]) => <Numbers key={name} name={name} values={[number(each.requests), format.percent(each.good / each.requests), number(each.ttft_ms.p95), format.count(each.served), format.count(each.wanted)]} />)}
      />
      <Table label="How requests ended" head={["Ended", "Requests"]} rows={[...Object.entries(figures.outcomes), ...Object.entries(figures.reasons).map(([name, each]): [string, number] => [`because of ${name}`, each])].map(([name, each]) => <Numbers key={name} name={name} values={[number(each)]} />)} />
    </>
  );
}

function Runs({ runs }: { runs: Run[] }): JSX.Element {
  const chosen = useSignal(0);
  const run = runs[Math.min(chosen.value, runs.length - 1)]!;
  return (
    <>
      <header class="row spread">
        <h2>{run.scenario}</h2>
        {runs.length > 1 && <Select label="Seed" value={String(chosen.value)} options={runs.map((each, i) => [String(i), `${each.seed}${each.passed ? "" : ", fails"}`])} onChange={(value) => (chosen.value = Number(value))} />}
      </header>
      <OneRun run={run} />
    </>
  );
}

function Comparison({ rows }: { rows: Difference[] }): JSX.Element {
  const [first] = rows;
  const table = (
    <Table
      label="A and B" head={["Figure", "A", "B", "B − A", "95 % interval", "B is"]}
      rows={rows.map((each, i) => (
        <tr key={i}>
          <th scope="row">{each.words}</th>
          {[number(each.a), number(each.b), number(each.difference), each.low === null || each.high === null ? "–" : `${number(each.low)} to ${number(each.high)}`].map((text, at) => (
            <td key={at} class="right num">
              {text}
            </td>
          ))}
          <td class="right">
            <span class={`state ${each.verdict === "better" ? "good" : each.verdict === "worse" ? "bad" : "off"}`}>
              <i aria-hidden="true" />
              {each.verdict}
            </span>
          </td>
        </tr>
      ))}
    />
  );
  return (
    <>
      {first?.sides && (
        <p class="soft">
          A is <code>{first.sides[0]}</code>, B is <code>{first.sides[1]}</code>. {format.plural(first.seeds ?? 0, "seed")}, the same for both; means over the seeds, and the 95 % interval of the paired difference (Student's t).
        </p>
      )}
      {table}
    </>
  );
}

const isRow = (value: Json): value is Row => typeof value === "object" && value !== null && !Array.isArray(value);
const isScalar = (value: Json): value is null | boolean | number | string => typeof value !== "object" || value === null;
const shown = (value: Json): string => (value === null ? "–" : typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value));
const words = (name: string): string => name.replaceAll("_", " ");

/** An object's scalars, also those of the objects in it. */
function flat(row: Row, before = ""): Row {
  const found: Row = {};
  for (const [name, value] of Object.entries(row)) {
    if (isRow(value) && !before) Object.assign(found, flat(value, `${name} `));
    else if (isScalar(value)) found[before + name] = value;
  }
  return found;
}

/** Rows of a result: as a table, and one of its numbers drawn. */
function Rows({ name, rows }: { name: string; rows: Row[] }): JSX.Element {
  const drawn = useSignal("");
  const all = rows.slice(0, ROWS_MAX).map((each) => flat(each));
  const columns = [...new Set(all.flatMap(Object.keys))].slice(0, COLUMNS_MAX);
  const numbers = columns.filter((column) => all.some((each) => typeof each[column] === "number"));
  const called = (row: Row): string => {
    const first = columns.filter((column) => column !== drawn.value && row[column] != null).slice(0, 3);
    return first.map((column) => (typeof row[column] === "number" ? `${words(column)} ${shown(row[column])}` : shown(row[column]!))).join(", ");
  };
  return (
    <section class="card">
      <header class="row spread">
        <h2>{words(name) || "Rows"}</h2>
        {all.length > 1 && numbers.length > 0 && <Select label="Draw" value={drawn.value} options={[["", "Nothing"], ...numbers.map((each): [string, string] => [each, words(each)])]} onChange={(value) => (drawn.value = value)} />}
      </header>
      {drawn.value && <Bars label={words(drawn.value)} rows={all.map((each) => [called(each), Number(each[drawn.value] ?? 0), shown(each[drawn.value] ?? null)])} />}
      <Table label={words(name) || "Rows"} head={columns.map(words)} rows={all.map((each, i) => <Numbers key={i} name={shown(each[columns[0] ?? ""] ?? null)} values={columns.slice(1).map((column) => shown(each[column] ?? null))} />)} />
      {rows.length > ROWS_MAX && <p class="soft small">The first {ROWS_MAX} of {rows.length}.</p>}
    </section>
  );
}

/** What a result says of how it was measured comes last. */
const CONDITIONS = new Set(["measured", "environment", "settings"]);

/** Any recorded result: its facts, and its rows as tables. */
function Result({ name, value, depth = 0 }: { name: string; value: Json; depth?: number }): JSX.Element | null {
  if (Array.isArray(value)) {
    if (value.length && value.every(isRow)) return <Rows name={name} rows={value} />;
    return <Facts rows={[[words(name) || "Values", <span class="num">{value.slice(0, ROWS_MAX).map(shown).join(", ")}</span>]]} />;
  }
  if (!isRow(value) || depth > DEPTH_MAX) return <Facts rows={[[words(name) || "Value", shown(value)]]} />;
  const entries = Object.entries(value);
  // Objects of one shape under names of their own are rows.
  const parts = entries.filter(([, each]) => !isScalar(each)).sort(([a], [b]) => Number(CONDITIONS.has(a)) - Number(CONDITIONS.has(b)));
  const scalars = entries.filter(([, each]) => isScalar(each));
  const alike = parts.length > 1 && parts.every(([, each]) => isRow(each) && Object.values(each).some(isScalar));
  return (
    <>
      {name && <h2>{words(name)}</h2>}
      {scalars.length > 0 && (
        <div class="card">
          <Facts rows={scalars.map(([key, each]): [string, string] => [words(key), shown(each)])} />
        </div>
      )}
      {alike && name !== "" ? <Rows name="" rows={parts.map(([key, each]) => ({ name: key, ...(each as Row) }))} /> : parts.map(([key, each]) => <Result key={key} name={key} value={each} depth={depth + 1} />)}
    </>
  );
}

export function Report({ report }: { report: Opened }): JSX.Element {
  const { content } = report;
  const [first] = Array.isArray(content) ? content : [];
  if (first && isRow(first) && String(first["schema"]).startsWith("penstock.simulate/")) {
    return "figures" in first ? <Runs runs={content as unknown as Run[]} /> : <Comparison rows={content as unknown as Difference[]} />;
  }
  return <Result name="" value={content} />;
}

/** A page that is one report. */
export function ReportPage({ report }: { report: Opened }): JSX.Element {
  return (
    <Page title={report.name}>
      <Report report={report} />
    </Page>
  );
}

export function Reports(): JSX.Element {
  const over = useSignal(false);
  const found = opened.value;
  return (
    <Page title="Reports" note={found?.name}>
      {problem.value && <Problem message={problem.value} />}
      <div
        class={`drop ${over.value ? "over" : ""} ${found ? "small" : ""}`}
        onDragOver={(event) => {
          event.preventDefault();
          over.value = true;
        }}
        onDragLeave={() => (over.value = false)}
        onDrop={(event) => {
          event.preventDefault();
          over.value = false;
          void open(event.dataTransfer?.files[0]);
        }}
      >
        <label>
          Open a report
          <input type="file" accept=".json,application/json" onChange={(event) => void open(event.currentTarget.files?.[0])} />
        </label>
        <p class="soft small">
          A report of <code>penstock simulate --json FILE</code>, or a result of <code>penstock bench --json FILE</code> or of <code>bench/</code>. It stays in this page.
        </p>
      </div>
      {found ? <Report key={found.name} report={found} /> : <Empty title="No report is open">Drop a file here, or choose one above.</Empty>}
    </Page>
  );
}
