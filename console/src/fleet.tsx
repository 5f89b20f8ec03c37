// The live map of the workers, and one worker's last quarter of an hour.
import { computed, useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { ApiError, ask } from "./api";
import { Chart } from "./chart";
import * as format from "./format";
import { usePolled } from "./poll";
import { go, href, place } from "./route";
import { type ModelLine, type WorkerLine, type WorkerLive, beat, kvShare, models, own, role, server, totals, ttftMs, workerOf, workers } from "./store";
import { Drawer, Empty, Facts, Page, Problem, Segmented, Skeleton, Spark, State, toneOf } from "./ui";

const DENSE = 24;
/** Workers of a model from which on they are shown as small tiles. */
const density = computed(() => (workers.value.length > DENSE ? "tiles" : "cards"));

function Kpi({ name, value, unit, values, max, tone }: { name: string; value: string; unit?: string; values?: number[]; max?: number; tone?: string }): JSX.Element {
  return (
    <div class={`kpi ${tone ?? ""}`}>
      <span class="kpi-name">{name}</span>
      <span class="kpi-value num">{value}</span>
      <span class="kpi-note num">{unit}</span>
      {values && values.length > 1 && <Spark values={values} max={max} />}
    </div>
  );
}

function Totals(): JSX.Element {
  beat.value;
  const live = workers.value.map((each) => each.now.value);
  const ready = live.filter((each) => each.state === "ready").length;
  const queued = models.value.reduce((sum, each) => sum + each.waiting, 0);
  const kv = totals.last(totals.kv, 1)[0];
  const waiting = totals.last(totals.waiting, 1)[0] ?? 0;
  return (
    <section class="kpis" aria-label="The whole fleet">
      <Kpi name="Workers ready" value={`${ready} / ${live.length}`} unit={live.length - ready ? `${format.count(live.length - ready)} not ready` : "all of them"} tone={live.length && ready < live.length ? (ready ? "warn" : "bad") : ""} />
      <Kpi name="Running" value={format.count(totals.last(totals.running, 1)[0] ?? 0)} unit="requests" values={totals.last(totals.running, 90)} max={4} />
      <Kpi name="Waiting" value={format.count(waiting)} unit={queued ? `${format.count(queued)} in the queue` : "none in the queue"} values={totals.last(totals.waiting, 90)} max={4} />
      <Kpi name="Output" value={format.count(Math.round(totals.current))} unit="tokens/s" values={totals.last(totals.rate, 90)} max={10} />
      <Kpi name="TTFT" value={ttftMs.value === null ? "–" : format.ms(ttftMs.value)} unit="mean of 10 s" />
      <Kpi name="KV in use" value={kv === undefined ? "–" : format.percent(kv)} unit="of all blocks" values={totals.last(totals.kv, 90)} max={1} />
      <Kpi name="Streams" value={format.count(server.value?.streams ?? 0)} unit={`${format.count(server.value?.connections ?? 0)} connections`} />
    </section>
  );
}

/** How much longer its steps take than those of its peers, or than predicted. */
const residual = (worker: WorkerLine): string => (worker.slowness == null ? "–" : `${worker.slowness >= 1 ? "+" : "−"}${format.percent(Math.abs(worker.slowness - 1))}`);

function Meter({ share, label }: { share: number | null; label: string }): JSX.Element {
  const value = share === null ? 0 : Math.min(1, share);
  return (
    <span class={`meter ${value > 0.95 ? "bad" : value > 0.85 ? "warn" : ""}`} role="meter" aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(value * 100)}>
      <i style={{ transform: `scaleX(${value.toFixed(3)})` }} />
    </span>
  );
}

function Card({ worker, current }: { worker: WorkerLive; current: boolean }): JSX.Element {
  const now = worker.now.value;
  beat.value;
  const kv = kvShare(now);
  const isUp = now.state === "ready" || now.state === "draining";
  const alone = now.left_alone !== "" && now.state === "ready";
  return (
    <a class={`worker ${alone ? "warn" : toneOf(now.state)}`} href={href("fleet", worker.id)} aria-current={current ? "true" : undefined}>
      <span class="worker-head">
        <b title={worker.id}>{worker.id}</b>
        <State state={now.state} alone={alone} />
      </span>
      {isUp ? (
        <>
          <span class="worker-rate">
            <span class="num">
              {format.count(Math.round(worker.trail.current))}
              <small>tokens/s</small>
            </span>
            <Spark values={worker.trail.last(worker.trail.rate, 60)} max={5} />
          </span>
          <span class="worker-load num">
            <span>
              {now.running ?? "–"} <small>running</small>
            </span>
            <span>
              {now.waiting ?? "–"} <small>waiting</small>
            </span>
            <span>
              {kv === null ? "–" : format.percent(kv)} <small>KV</small>
            </span>
          </span>
          <Meter share={kv} label={`KV cache of ${worker.id}`} />
        </>
      ) : (
        <span class="worker-stage">{now.stage || now.state}</span>
      )}
    </a>
  );
}

function Tile({ worker, current }: { worker: WorkerLive; current: boolean }): JSX.Element {
  const now = worker.now.value;
  beat.value;
  const kv = kvShare(now);
  const alone = now.left_alone !== "" && now.state === "ready";
  const rate = format.count(Math.round(worker.trail.current));
  return (
    <a
      class={`worker tile ${alone ? "warn" : toneOf(now.state)}`}
      href={href("fleet", worker.id)}
      aria-current={current ? "true" : undefined}
      aria-label={`${worker.id}, ${now.state}, ${rate} tokens per second, ${now.running ?? 0} running, KV ${kv === null ? "unknown" : format.percent(kv)}`}
    >
      <span class="worker-head">
        <i class={`dot ${alone ? "warn" : toneOf(now.state)}`} aria-hidden="true" />
        <b>{worker.id}</b>
      </span>
      {now.state === "ready" || now.state === "draining" ? (
        <span class="tile-line num">
          <span>{rate}</span>
          <span>
            {now.running ?? "–"}
            {now.waiting ? <small> +{now.waiting}</small> : null}
          </span>
        </span>
      ) : (
        <small class="tile-line">{now.state}</small>
      )}
      <Meter share={kv} label={`KV cache of ${worker.id}`} />
    </a>
  );
}

function Table({ list }: { list: WorkerLive[] }): JSX.Element {
  beat.value;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Workers">
      <table>
        <thead>
          <tr>
            <th scope="col">Worker</th>
            <th scope="col">State</th>
            <th scope="col">Engine</th>
            <th scope="col" class="right">Tokens/s</th>
            <th scope="col" class="right">Running</th>
            <th scope="col" class="right">Waiting</th>
            <th scope="col" class="right">KV</th>
            <th scope="col" class="right">Residual</th>
            <th scope="col">Version</th>
            <th scope="col" class="right">Restarts</th>
          </tr>
        </thead>
        <tbody>
          {list.map((worker) => {
            const now = worker.now.value;
            const kv = kvShare(now);
            return (
              <tr key={worker.id}>
                <th scope="row">
                  <a href={href("fleet", worker.id)}>{worker.id}</a>
                </th>
                <td>
                  <State state={now.state} alone={now.left_alone !== "" && now.state === "ready"} />
                </td>
                <td>{now.engine}</td>
                <td class="right num">{format.count(Math.round(worker.trail.current))}</td>
                <td class="right num">{now.running ?? "–"}</td>
                <td class="right num">{now.waiting ?? "–"}</td>
                <td class="right num">{kv === null ? "–" : format.percent(kv)}</td>
                <td class="right num">{residual(now)}</td>
                <td class="mono">{now.identity?.slice(0, 8) || "–"}</td>
                <td class="right num">{now.restarts || ""}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function ModelSection({ model, list, view, chosen }: { model: ModelLine; list: WorkerLive[]; view: string; chosen: string }): JSX.Element {
  return (
    <section class="model" aria-label={`Model ${model.name}`}>
      <header>
        <h2>{model.name}</h2>
        <p class="soft num">
          {model.ready} of {model.workers} ready
          {model.waiting > 0 && <> · {format.count(model.waiting)} in the queue</>}
        </p>
        {view === "tiles" && <p class="soft small tiles-key">tokens/s, requests running + waiting, share of KV in use</p>}
      </header>
      {list.length === 0 ? (
        <Empty title="No worker">Requests for this model wait until one comes. Workers come from the configuration: models[].workers, replicas or discover.</Empty>
      ) : view === "table" ? (
        <Table list={list} />
      ) : (
        <div class={`grid ${view}`}>
          {list.map((each) => (view === "tiles" ? <Tile key={each.id} worker={each} current={each.id === chosen} /> : <Card key={each.id} worker={each} current={each.id === chosen} />))}
        </div>
      )}
    </section>
  );
}

function Orders({ worker }: { worker: WorkerLine }): JSX.Element {
  const problem = useSignal("");
  const asks = useSignal(false);
  const busy = useSignal(false);
  const order = async (verb: "drain" | "undrain"): Promise<void> => {
    busy.value = true;
    problem.value = "";
    asks.value = false;
    try {
      await ask(`/admin/workers/${encodeURIComponent(worker.id)}/${verb}`, { method: "POST" });
    } catch (error) {
      problem.value = error instanceof ApiError ? error.message : String(error);
    }
    busy.value = false;
  };
  if (role.value !== "admin") return <p class="soft small">Draining takes an admin key.</p>;
  const out = worker.state === "draining" || (worker.state === "gone" && worker.stage === "drained by hand");
  return (
    <div class="orders">
      {out ? (
        <button type="button" class="primary" disabled={busy.value} onClick={() => void order("undrain")}>
          Bring it back
        </button>
      ) : asks.value ? (
        <div class="confirm" role="alertdialog" aria-label={`Drain ${worker.id}?`}>
          <p>
            Drain <b>{worker.id}</b>? It gets nothing new; its {format.plural(worker.running ?? 0, "stream")} may end first.
          </p>
          <button type="button" class="danger" disabled={busy.value} onClick={() => void order("drain")}>
            Drain
          </button>
          <button type="button" class="quiet" onClick={() => (asks.value = false)}>
            Cancel
          </button>
        </div>
      ) : (
        <button type="button" onClick={() => (asks.value = true)}>
          Drain…
        </button>
      )}
      {problem.value && <Problem message={problem.value} />}
    </div>
  );
}

function History({ worker }: { worker: WorkerLive }): JSX.Element {
  // What is remembered changes every five seconds, what this page has seen every second.
  const drawn = useSignal<Remembered | number>(0);
  const waits = useRef<Remembered | null>(null);
  drawn.value;
  const latest = beat.value;
  useEffect(() => {
    // A moment after the map, so that the two are not one long task.
    const timer = setTimeout(() => (drawn.value = waits.current ?? latest), 250);
    return () => clearTimeout(timer);
  }, [latest]);
  const path = role.value === "admin" ? `/admin/workers/${encodeURIComponent(worker.id)}/history` : "";
  const { told } = usePolled<Remembered>(path, REMEMBERED_EVERY_MS);
  const remembered = told.value;
  waits.current = remembered;
  return useMemo(() => <HistoryCharts worker={worker} remembered={typeof drawn.value === "number" ? null : drawn.value} />, [worker, drawn.value]);
}

/** `GET /admin/workers/{id}/history`: what the server remembers. */
interface Remembered {
  step_s: number;
  times: number[];
  tokens_per_s: (number | null)[];
  running: (number | null)[];
  waiting: (number | null)[];
  kv_share: (number | null)[];
}

const REMEMBERED_EVERY_MS = 5000;

function HistoryCharts({ worker, remembered }: { worker: WorkerLive; remembered: Remembered | null }): JSX.Element {
  const { trail } = worker;
  const seen = trail.last(trail.at, 300);
  const seenStep = seen.length > 1 ? (seen[seen.length - 1]! - seen[0]!) / (seen.length - 1) : 1000;
  const step = remembered ? remembered.step_s * 1000 : seenStep;
  const times = remembered ? remembered.times.map((each) => each * 1000) : seen.map((_, i) => (seen[0] ?? 0) + i * seenStep);
  const rate = remembered?.tokens_per_s ?? trail.last(trail.rate, 300);
  const now = worker.now.peek();
  const kv = kvShare(now);
  return (
    <>
      <Chart title="Output" hint="tokens/s" headline={format.count(Math.round(trail.current))} times={times} stepMs={step} unit={format.count} height={112} min={4} lines={[{ name: "tokens/s", color: "decode", kind: "line", values: rate }]} />
      <Chart
        title="Requests"
        headline={`${now.running ?? 0} running, ${now.waiting ?? 0} waiting`}
        times={times}
        stepMs={step}
        unit={format.count}
        height={112}
        min={4}
        lines={[
          { name: "running", color: "prefill", kind: "area", values: remembered?.running ?? trail.last(trail.running, 300) },
          { name: "waiting", color: "queue", kind: "area", values: remembered?.waiting ?? trail.last(trail.waiting, 300) },
        ]}
      />
      <Chart title="KV cache" hint="blocks in use" headline={kv === null ? "–" : format.percent(kv)} times={times} stepMs={step} unit={format.percent} height={112} min={1} lines={[{ name: "in use", color: "kv", kind: "area", values: remembered?.kv_share ?? trail.last(trail.kv, 300) }]} />
    </>
  );
}

/** The last lines that a worker printed, where this server launched it. */
function LogTail({ id }: { id: string }): JSX.Element | null {
  const { told, problem } = usePolled<{ lines: { at_ms: number; text: string }[] | null }>(`/admin/workers/${encodeURIComponent(id)}/log`, REMEMBERED_EVERY_MS);
  const box = useRef<HTMLOListElement>(null);
  const lines = told.value?.lines;
  useEffect(() => {
    if (box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines?.length]);
  if (!lines) return problem.value ? <Problem message={problem.value} /> : null;
  return (
    <section>
      <h3>Its last printed lines</h3>
      {lines.length === 0 ? (
        <p class="soft small">Nothing yet.</p>
      ) : (
        <ol class="log mono" ref={box} tabIndex={0} aria-label={`The last lines of ${id}`}>
          {lines.map((line, i) => (
            <li key={i}>
              <span class="soft">{format.clock(line.at_ms)}</span> {line.text}
            </li>
          ))}
        </ol>
      )}
    </section>
  );
}

function Detail({ worker }: { worker: WorkerLive }): JSX.Element {
  const tail = useMemo(() => <LogTail key={worker.id} id={worker.id} />, [worker.id]); // Not drawn again with every number.
  const now = worker.now.value;
  const rows: [string, JSX.Element | string][] = [
    ["State", <State state={now.state} alone={now.left_alone !== "" && now.state === "ready"} />],
    ["Model", now.model],
    ["Engine", now.engine],
  ];
  if (now.stage) rows.push(["Doing", now.stage]);
  if (now.left_alone) rows.push(["Left alone", now.left_alone]);
  if (now.address) rows.push(["Address", <code>{now.address}</code>]);
  if (now.standing) rows.push(["Standing", now.standing]);
  if (now.probe) rows.push(["Last probe", now.probe]);
  rows.push(["Residual", <span class="num" title="Its steps' time over that of its peers">{residual(now)}</span>]);
  if (now.identity) rows.push(["Computes", <code title={now.identity}>{now.identity.slice(0, 24)}</code>]);
  if (now.kv_blocks_total) rows.push(["KV blocks", <span class="num">{`${format.count(now.kv_blocks_used ?? 0)} of ${format.count(now.kv_blocks_total)}`}</span>]);
  rows.push(["Life", <span class="num">{`epoch ${now.epoch}, ${format.plural(now.restarts, "restart")}`}</span>]);
  if (now.age_s !== null) rows.push(["Last heard", <span class="num">{`${format.duration(now.age_s)} ago`}</span>]);
  if (now.adapters.length) rows.push(["Adapters", now.adapters.join(", ")]);
  return (
    <Drawer title={worker.id} sub={role.value === "admin" ? "The last 15 minutes" : "The last five minutes, since this page was opened"} onClose={() => go("fleet")}>
      <Orders worker={now} />
      <Facts rows={rows} />
      <History key={worker.id} worker={worker} />
      {now.notes.length > 0 && (
        <section>
          <h3>Its events</h3>
          <ol class="notes">
            {[...now.notes].reverse().map((note, i) => (
              <li key={i}>{note}</li>
            ))}
          </ol>
        </section>
      )}
      {role.value === "admin" && tail}
    </Drawer>
  );
}

function OwnModels(): JSX.Element {
  const told = own.value;
  return (
    <Page title="Models" note="What your key may use">
      {!told ? (
        <Skeleton />
      ) : told.models.length === 0 ? (
        <Empty title="No model">This key may use none of the server's models.</Empty>
      ) : (
        <div class="grid cards">
          {told.models.map((model) => (
            <div class={`worker ${model.ready ? "good" : "info"}`} key={model.name}>
              <span class="worker-head">
                <b>{model.name}</b>
                <State state={model.stage.startsWith("asleep") ? "asleep" : model.ready ? "ready" : "loading"} />
              </span>
              <span class="worker-stage">{model.stage === "ready" ? "It takes requests." : model.stage}</span>
              {!model.ready && model.progress !== null && <Meter share={model.progress} label={`Progress of ${model.name}`} />}
            </div>
          ))}
        </div>
      )}
    </Page>
  );
}

export function Fleet(): JSX.Element {
  const asked = useSignal<"" | "cards" | "tiles" | "table">("");
  if (role.value === "tenant") return <OwnModels />;
  const view = asked.value || density.value;
  const chosen = place.value.page === "fleet" ? place.value.rest : "";
  const open = chosen ? workers.value && workerOf(chosen) : undefined;
  return (
    <div class={`split ${open ? "open" : ""}`}>
      <Page
        title="Fleet"
        actions={
          <Segmented
            label="How workers are shown"
            value={view}
            options={[
              ["cards", "Cards"],
              ["tiles", "Map"],
              ["table", "Table"],
            ]}
            onChange={(value) => (asked.value = value)}
          />
        }
      >
        {!server.value ? (
          <Skeleton lines={6} />
        ) : (
          <>
            <Totals />
            {models.value.map((model) => (
              <ModelSection key={model.name} model={model} list={workers.value.filter((each) => each.now.peek().model === model.name)} view={view} chosen={chosen} />
            ))}
            {models.value.length === 0 && <Empty title="No model is configured" />}
          </>
        )}
        {chosen && !open && server.value && <Problem message={`There is no worker ${chosen}.`} again={() => go("fleet")} />}
      </Page>
      {open && <Detail worker={open} />}
    </div>
  );
}
