// What went through the server: the last 15 minutes by five seconds, the last day by five minutes. The server keeps
// the numbers, so they are there when the page is opened.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { Chart, type Line } from "./chart";
import { type SloRow, left, ofServed } from "./alerts";
import * as format from "./format";
import { usePolled } from "./poll";
import { hello } from "./store";
import { Empty, Page, Problem, Segmented, Select, Skeleton } from "./ui";

type Maybe = (number | null)[];

/** One series of `GET /admin/history`, column by column. */
interface Columns {
  model: string;
  band: string;
  requests: number[];
  outcomes: Record<string, number[]>;
  prompt_tokens: number[];
  cached_tokens: number[];
  generated_tokens: number[];
  queue_mean_ms: Maybe;
  prefill_mean_ms: Maybe;
  ttft_p50_ms: Maybe;
  ttft_p95_ms: Maybe;
  ttft_p99_ms: Maybe;
  tpot_p50_ms: Maybe;
  tpot_p95_ms: Maybe;
  ttft_due: number[];
  ttft_late: number[];
  tpot_due: number[];
  tpot_late: number[];
}

export interface Window {
  now: number;
  step_s: number;
  times: number[];
  series: Columns[];
  summary: Columns[];
  total: Columns;
  total_summary: Columns;
}

const RANGES: Record<string, { seconds: number; every_ms: number }> = {
  "15m": { seconds: 900, every_ms: 5000 },
  "24h": { seconds: 86_400, every_ms: 60_000 },
};
const WELL = new Set(["stop", "length", "tool_calls", "budget"]);
const KINDS: [string, string, string][] = [
  ["error", "error", "bad"],
  ["shed", "shed", "warn"],
  ["limited", "over a limit", "violet"],
  ["rejected", "wrong request", "gray"],
  ["abort", "client left", "pale"],
];

const sum = (values: number[] | undefined): number => (values ?? []).reduce((all, each) => all + each, 0);

function share(part: number[], of: number[]): string {
  const all = sum(of);
  return all ? format.percent(sum(part) / all) : "–";
}

const BRIEF: Record<string, string> = { availability: "availability", ttft: "TTFT", tpot: "TPOT" };
const BUDGETS_EVERY_MS = 30_000;

/** The objective of what is shown whose error budget of three days is nearest to its end. */
function worst(rows: SloRow[], pair: string): SloRow | undefined {
  const counted = ofServed(rows).filter((each) => each.budget_left !== null && (!pair || `${each.model}\n${each.band}` === pair));
  return counted.sort((one, other) => one.budget_left! - other.budget_left!)[0];
}

function Figures({ columns, stepS, spanS, budget }: { columns: Columns; stepS: number; spanS: number; budget?: SloRow }): JSX.Element {
  const asked = sum(columns.requests);
  const well = Object.entries(columns.outcomes).reduce((all, [kind, values]) => all + (WELL.has(kind) ? sum(values) : 0), 0);
  const faults = sum(columns.outcomes["error"]) + sum(columns.outcomes["shed"]);
  const rows: [string, string, string][] = [
    ["Requests", format.count(asked), `${format.count(asked / spanS)}/s`],
    ["Answered whole", format.count(well), asked ? format.percent(well / asked) : ""],
    ["Failed or shed", format.count(faults), asked ? format.percent(faults / asked) : ""],
    ["Output tokens", format.count(sum(columns.generated_tokens)), `${format.count(sum(columns.generated_tokens) / spanS)}/s`],
    ["Prompt tokens", format.count(sum(columns.prompt_tokens)), sum(columns.prompt_tokens) ? `${share(columns.cached_tokens, columns.prompt_tokens)} cached` : ""],
    ["TTFT in time", sum(columns.ttft_due) ? format.percent(1 - sum(columns.ttft_late) / sum(columns.ttft_due)) : "–", sum(columns.ttft_due) ? `of ${format.count(sum(columns.ttft_due))} promised` : "nothing promised"],
    ["Error budget left", budget ? left(budget.budget_left!) : "–", budget ? `${BRIEF[budget.objective]}, 3 days` : "nothing counted"],
  ];
  return (
    <section class="kpis" aria-label={`All of the window, by ${stepS} s`}>
      {rows.map(([name, value, note]) => (
        <div class="kpi" key={name}>
          <span class="kpi-name">{name}</span>
          <span class="kpi-value num">{value}</span>
          <span class="kpi-note num">{note}</span>
        </div>
      ))}
    </section>
  );
}

const last = (values: Maybe | undefined): number | null => {
  for (let i = (values?.length ?? 0) - 1; i >= 0; i--) if (values![i] != null) return values![i]!;
  return null;
};

function Charts({ columns, summary, window: told }: { columns: Columns; summary: Columns; window: Window }): JSX.Element {
  const times = told.times.map((each) => each * 1000);
  const stepMs = told.step_s * 1000;
  const open = (told.now - told.times[told.times.length - 1]!) / told.step_s; // The last column is not over yet.
  const rate = (values: number[]): Maybe => values.map((each, i) => (i === values.length - 1 ? (open < 0.5 ? null : each / (told.now - told.times[i]!)) : each / told.step_s));
  const spanS = Math.max(1, told.now - told.times[0]!);
  const common = { times, stepMs };
  const promiseMs = hello.value?.ttft_target_ms ?? 0;
  const tpotMs = hello.value?.tpot_target_ms ?? 0;
  const well = columns.requests.map((_, i) => Object.entries(columns.outcomes).reduce((all, [kind, values]) => all + (WELL.has(kind) ? values[i]! : 0), 0));
  const kinds = KINDS.filter(([kind]) => sum(columns.outcomes[kind]) > 0);
  const rest = columns.requests.map((all, i) => all - well[i]!);
  const faults: Line[] = kinds.map(([kind, name, color]) => ({ name, color, kind: "bar", values: columns.outcomes[kind]! }));
  const one = (value: number | null | undefined): string => (value == null ? "–" : format.ms(value));
  return (
    <div class="charts">
      <Chart
        {...common}
        title="Requests"
        hint="ended, per second"
        headline={`${format.count(sum(columns.requests) / spanS)}/s`}
        unit={format.count}
        lines={[
          { name: "answered", color: "prefill", kind: "area", values: rate(well) },
          { name: "not answered", color: "bad", kind: "area", values: rate(rest) },
        ]}
      />
      <Chart
        {...common}
        title="Tokens"
        hint="per second"
        headline={`${format.count(sum(columns.generated_tokens) / spanS)}/s out`}
        unit={format.count}
        lines={[
          { name: "output", color: "decode", values: rate(columns.generated_tokens) },
          { name: "prompt", color: "prefill", values: rate(columns.prompt_tokens) },
          { name: "of it cached", color: "kv", dashed: true, values: rate(columns.cached_tokens) },
        ]}
      />
      <Chart
        {...common}
        title="Time to first token"
        hint="mean queue + prefill"
        headline={`p95 ${one(summary.ttft_p95_ms[0])}`}
        unit={format.ms}
        promise={promiseMs ? { value: promiseMs, label: `promised ${format.ms(promiseMs)}` } : undefined}
        lines={[
          { name: "queue", color: "queue", kind: "area", values: columns.queue_mean_ms },
          { name: "prefill", color: "prefill", kind: "area", values: columns.prefill_mean_ms },
          { name: "p95", color: "ink", dashed: true, values: columns.ttft_p95_ms },
        ]}
      />
      <Chart
        {...common}
        title="Time per output token"
        headline={`p95 ${one(summary.tpot_p95_ms[0])}`}
        unit={format.ms}
        promise={tpotMs ? { value: tpotMs, label: `promised ${format.ms(tpotMs)}` } : undefined}
        lines={[
          { name: "p50", color: "decode", values: columns.tpot_p50_ms },
          { name: "p95", color: "ink", dashed: true, values: columns.tpot_p95_ms },
        ]}
      />
      <Chart {...common} title="Not answered, by kind" hint={`per ${format.duration(told.step_s)}`} headline={format.count(sum(rest))} unit={format.count} min={4} lines={faults} empty="Every request of this time was answered." />
      <Chart
        {...common}
        title="Late first tokens"
        hint="share of those that were promised"
        headline={share(columns.ttft_late, columns.ttft_due)}
        unit={format.percent}
        min={0.02}
        lines={[{ name: "late", color: "warn", kind: "bar", values: columns.ttft_due.map((due, i) => (due ? columns.ttft_late[i]! / due : null)) }]}
        empty="No first token was promised in this time."
      />
    </div>
  );
}

function Breakdown({ told, pick }: { told: Window; pick: (model: string, band: string) => void }): JSX.Element {
  return (
    <section class="card">
      <h2>By model and band</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="By model and band">
        <table>
          <thead>
            <tr>
              <th scope="col">Model</th>
              <th scope="col">Band</th>
              <th scope="col" class="right">Requests</th>
              <th scope="col" class="right">Failed or shed</th>
              <th scope="col" class="right">Output tokens</th>
              <th scope="col" class="right">TTFT p50</th>
              <th scope="col" class="right">TTFT p95</th>
              <th scope="col" class="right">TPOT p50</th>
              <th scope="col" class="right">Late</th>
            </tr>
          </thead>
          <tbody>
            {told.summary.map((each) => {
              const faults = sum(each.outcomes["error"]) + sum(each.outcomes["shed"]);
              const one = (values: Maybe): string => (last(values) === null ? "–" : format.ms(last(values)!));
              return (
                <tr key={`${each.model}/${each.band}`}>
                  <th scope="row">
                    <button type="button" class="link-button" onClick={() => pick(each.model, each.band)}>
                      {each.model}
                    </button>
                  </th>
                  <td>{each.band}</td>
                  <td class="right num">{format.count(sum(each.requests))}</td>
                  <td class={`right num ${faults ? "bad-text" : ""}`}>{format.count(faults)}</td>
                  <td class="right num">{format.count(sum(each.generated_tokens))}</td>
                  <td class="right num">{one(each.ttft_p50_ms)}</td>
                  <td class="right num">{one(each.ttft_p95_ms)}</td>
                  <td class="right num">{one(each.tpot_p50_ms)}</td>
                  <td class="right num">{share(each.ttft_late, each.ttft_due)}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </section>
  );
}

export function Traffic(): JSX.Element {
  const range = useSignal<"15m" | "24h">("15m");
  const pair = useSignal("");
  const { seconds, every_ms } = RANGES[range.value]!;
  const { told, problem, again } = usePolled<Window>(`/admin/history?seconds=${seconds}`, every_ms);

  const budgets = usePolled<{ slo: SloRow[] }>("/admin/alerts", BUDGETS_EVERY_MS).told.value?.slo ?? [];
  const shown = told.value;
  const index = shown ? shown.series.findIndex((each) => `${each.model}\n${each.band}` === pair.value) : -1;
  const columns = shown && (index < 0 ? shown.total : shown.series[index]!);
  const summary = shown && (index < 0 ? shown.total_summary : shown.summary[index]!);
  return (
    <Page
      title="Traffic"
      note="All gateway processes together, kept by the server"
      actions={
        <>
          {shown && (
            <Select
              label="Show"
              value={index < 0 ? "" : pair.value}
              options={[["", "All models and bands"], ...shown.series.map((each): [string, string] => [`${each.model}\n${each.band}`, `${each.model} · ${each.band}`])]}
              onChange={(value) => (pair.value = value)}
            />
          )}
          <Segmented
            label="How far back"
            value={range.value}
            options={[
              ["15m", "15 min"],
              ["24h", "24 h"],
            ]}
            onChange={(value) => {
              told.value = null;
              range.value = value;
            }}
          />
        </>
      }
    >
      {problem.value && <Problem message={problem.value} again={again} />}
      {!shown && !problem.value && <Skeleton lines={8} />}
      {shown && columns && summary && (
        <>
          <Figures columns={columns} stepS={shown.step_s} spanS={Math.max(1, shown.now - shown.times[0]!)} budget={worst(budgets, index < 0 ? "" : pair.value)} />
          {sum(shown.total.requests) === 0 ? (
            <Empty title="No request has ended in this time">
              Send one from the playground, or put load on it: <code>penstock bench</code>
            </Empty>
          ) : (
            <Charts columns={columns} summary={summary} window={shown} />
          )}
          {shown.summary.length > 1 && <Breakdown told={shown} pick={(model, band) => (pair.value = `${model}\n${band}`)} />}
        </>
      )}
    </Page>
  );
}
