// How many workers every model has, how many it is to have, and why: what is decided, by what, and orders by hand.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { ApiError, ask } from "./api";
import { Chart } from "./chart";
import * as format from "./format";
import { usePolled } from "./poll";
import { Empty, Facts, Page, Problem, Skeleton } from "./ui";

interface Opinion {
  of: string;
  workers: number;
  why: string;
}

interface Decision {
  wall_ns: number;
  move: "hold" | "out" | "in";
  acts: boolean;
  why: string;
  ready: number;
  pending: number;
  wanted: number;
  workers: number;
  pools: Record<string, number>;
  opinions: Opinion[];
  held_by: string;
  safe_rate: number;
  rate: number;
  forecast: number;
  cold_start_s: number;
}

interface Signals {
  window_s: number;
  arrived: number;
  answered: number;
  shed: number;
  due: number;
  late: number;
  ttft_p95_s: number;
  tpot_p95_s: number;
  wait_p95_s: number;
  waiting: number;
  running: number;
  kv_use: number;
}

interface Pool {
  name: string;
  ready: number;
  pending: number;
  draining: number;
  asleep: number;
  workers: number;
  max: number;
  spot: boolean;
  price: number;
  trouble: string;
}

interface Point {
  at_ms: number;
  ready: number;
  pending: number;
  workers: number;
  rate: number;
  forecast: number;
  safe_rate: number;
}

interface ModelScale {
  model: string;
  mode: string;
  min: number;
  max: number;
  standby: number;
  workers: number;
  ready: number;
  pools: Pool[];
  leads: boolean;
  leader: string;
  override: { workers: number; until_ns: number; by: string } | null;
  decision: Decision | null;
  signals: Signals | null;
  moves: Decision[];
  points: Point[];
}

interface Report {
  models: ModelScale[];
}

const EVERY_MS = 3000;
const HOUR_MINUTES = "60";
const MOVES_SHOWN = 20;
const ADVISERS: Record<string, string> = { reactive: "The load now", capacity: "The load to come", floor: "The least number" };
const ms = (ns: number): number => ns / 1e6;
const pending = (of: ModelScale): number => of.pools.reduce((sum, each) => sum + each.pending, 0);

function moved(of: Decision): JSX.Element {
  const [tone, words] = of.move === "hold" ? ["off", "hold"] : of.move === "out" ? ["info", "more"] : ["drain", "fewer"];
  return (
    <span class={`state ${of.acts || of.move === "hold" ? tone : "off"}`}>
      <i aria-hidden="true" />
      {words}
      {!of.acts && of.move !== "hold" && " (advice)"}
    </span>
  );
}

/** The three advisers; whose number is the largest is followed. */
function Opinions({ of }: { of: Decision }): JSX.Element {
  const most = Math.max(...of.opinions.map((each) => each.workers));
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Opinions">
      <table class="opinions">
        <thead>
          <tr>
            <th scope="col">Opinion of</th>
            <th scope="col" class="right">Workers</th>
            <th scope="col">Because</th>
          </tr>
        </thead>
        <tbody>
          {of.opinions.map((each) => (
            <tr key={each.of} class={each.workers === most ? "followed" : undefined}>
              <th scope="row">{ADVISERS[each.of] ?? each.of}</th>
              <td class="right num">{each.workers}</td>
              <td class="wrap">{each.why}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Pools({ of }: { of: ModelScale }): JSX.Element {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={`Pools of ${of.model}`}>
      <table>
        <thead>
          <tr>
            <th scope="col">Pool</th>
            <th scope="col" class="right">To be</th>
            <th scope="col" class="right">Ready</th>
            <th scope="col" class="right">Starting</th>
            <th scope="col" class="right">Draining</th>
            <th scope="col" class="right">Asleep</th>
            <th scope="col" class="right">At most</th>
            <th scope="col" class="right">Price/h</th>
            <th scope="col">Trouble</th>
          </tr>
        </thead>
        <tbody>
          {of.pools.map((each) => (
            <tr key={each.name}>
              <th scope="row">
                {each.name || "all"}
                {each.spot && <span class="soft"> · spot</span>}
              </th>
              <td class="right num">{each.workers}</td>
              <td class="right num">{each.ready}</td>
              <td class="right num">{each.pending}</td>
              <td class="right num">{each.draining}</td>
              <td class="right num">{each.asleep}</td>
              <td class="right num">{each.max || "–"}</td>
              <td class="right num">{each.price || "–"}</td>
              <td class={`wrap ${each.trouble ? "bad-text" : "soft"}`}>{each.trouble || "none"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Charts({ of }: { of: ModelScale }): JSX.Element {
  const { points } = of;
  const times = points.map((each) => each.at_ms);
  const stepMs = points.length > 1 ? Math.max(1000, (times[times.length - 1]! - times[0]!) / (points.length - 1)) : 5000;
  const latest = points[points.length - 1];
  return (
    <div class="charts">
      <Chart
        title="Workers"
        times={times}
        stepMs={stepMs}
        unit={format.count}
        min={Math.max(2, of.min)}
        headline={`${of.ready} of ${of.workers}`}
        empty="Nothing was decided yet."
        lines={[
          { name: "ready", color: "decode", kind: "area", values: points.map((each) => each.ready) },
          { name: "starting", color: "queue", kind: "area", values: points.map((each) => each.pending) },
          { name: "to be", color: "ink", dashed: true, values: points.map((each) => each.workers) },
        ]}
      />
      <Chart
        title="Work"
        hint="tokens per second, a generated one counts four times"
        times={times}
        stepMs={stepMs}
        unit={format.count}
        headline={latest ? `${format.count(latest.rate)}/s` : undefined}
        empty="Nothing was decided yet."
        lines={[
          { name: "comes", color: "prefill", kind: "area", values: points.map((each) => each.rate) },
          { name: "is expected", color: "violet", dashed: true, values: points.map((each) => each.forecast) },
          { name: "is safe", color: "ink", values: points.map((each) => (each.safe_rate ? each.safe_rate * each.ready : null)) },
        ]}
      />
    </div>
  );
}

/** What a decision was made from. */
function inputs(of: Decision, seen: Signals | null): [string, string][] {
  const known: [string, string][] = [
    ["Work", `${format.count(of.rate)} tokens/s come, ${format.count(of.forecast)} are expected`],
    ["A worker", of.safe_rate ? `${format.count(of.safe_rate)} tokens/s are safe; ${format.duration(of.cold_start_s)} to get ready` : "not known yet"],
  ];
  if (!seen) return known;
  return [
    ...known,
    ["Requests", `${format.count(seen.arrived)} came in ${format.duration(seen.window_s)}, ${format.count(seen.answered)} were answered, ${format.count(seen.shed)} shed`],
    ["Now", `${format.count(seen.running)} run, ${format.count(seen.waiting)} wait, ${format.percent(seen.kv_use)} of the KV memory is in use`],
    ["Late", `${format.count(seen.late)} of ${format.count(seen.due)} that were promised`],
    ["p95", `wait ${format.ms(seen.wait_p95_s * 1000)}, TTFT ${format.ms(seen.ttft_p95_s * 1000)}, TPOT ${format.ms(seen.tpot_p95_s * 1000)}`],
  ];
}

function Moves({ of }: { of: ModelScale }): JSX.Element {
  const open = useSignal(0);
  if (!of.moves.length) return <p class="soft">Nothing was changed yet.</p>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={`Decisions on ${of.model}`}>
      <table>
        <thead>
          <tr>
            <th scope="col">When</th>
            <th scope="col">Move</th>
            <th scope="col" class="right">Ready</th>
            <th scope="col" class="right">To be</th>
            <th scope="col">Because</th>
            <th scope="col">Held by</th>
            <th scope="col">Made from</th>
          </tr>
        </thead>
        <tbody>
          {of.moves.slice(0, MOVES_SHOWN).map((each) => (
            <tr key={each.wall_ns}>
              <td class="num soft">{format.date(ms(each.wall_ns))}</td>
              <td>{moved(each)}</td>
              <td class="right num">{each.pending ? `${each.ready} + ${each.pending}` : each.ready}</td>
              <th scope="row" class="right num">
                {each.workers}
              </th>
              <td class="wrap">{each.why}</td>
              <td class="wrap soft">{each.held_by}</td>
              <td class="wrap">
                <button type="button" class="link-button" aria-expanded={open.value === each.wall_ns} onClick={() => (open.value = open.value === each.wall_ns ? 0 : each.wall_ns)}>
                  {each.opinions.map((one) => one.workers).join(" · ")}
                </button>
                {open.value === each.wall_ns && (
                  <ul class="plain soft">
                    {each.opinions.map((one) => (
                      <li key={one.of}>
                        {ADVISERS[one.of] ?? one.of}: {one.workers}, {one.why}
                      </li>
                    ))}
                    {inputs(each, null).map(([name, text]) => (
                      <li key={name}>
                        {name}: {text}
                      </li>
                    ))}
                  </ul>
                )}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Order({ of, send }: { of: ModelScale; send: (body: object) => void }): JSX.Element {
  const given = useSignal({ workers: "", minutes: HOUR_MINUTES });
  const ordered = of.override;
  const set = (fields: object): void => void (given.value = { ...given.value, ...fields });
  return (
    <>
      {ordered && (
        <div class="confirm" role="status">
          <p>
            <b>{format.plural(ordered.workers, "worker")}</b> by order until {format.date(ms(ordered.until_ns))}
            {ordered.by && (
              <span class="soft">
                {" "}
                of <code>{ordered.by}</code>
              </span>
            )}
            , whatever the load.
          </p>
          <button type="button" onClick={() => send({ model: of.model })}>
            Let the load decide
          </button>
        </div>
      )}
      <form
        class="inline-form"
        onSubmit={(event) => {
          event.preventDefault();
          send({ model: of.model, workers: Number(given.value.workers), for_s: Number(given.value.minutes) * 60 });
          set({ workers: "" });
        }}
      >
        <label>
          Workers, by order
          <input type="number" min="0" max={of.max || undefined} required value={given.value.workers} onInput={(event) => set({ workers: event.currentTarget.value })} />
        </label>
        <label>
          For so many minutes
          <input type="number" min="1" step="any" required value={given.value.minutes} onInput={(event) => set({ minutes: event.currentTarget.value })} />
        </label>
        <button type="submit">Order</button>
      </form>
    </>
  );
}

function Model({ of, send }: { of: ModelScale; send: (body: object) => void }): JSX.Element {
  const made = of.decision;
  return (
    <section class="card" aria-label={`Capacity of ${of.model}`}>
      <header class="row spread">
        <h2>
          {of.model}{" "}
          <span class="soft num">
            {of.ready} ready{pending(of) > 0 && ` + ${pending(of)} starting`}, {of.workers} to be
          </span>
        </h2>
        <span class="soft">
          {of.mode === "act" ? "acts" : "advises only"} · {of.min} to {of.max}
          {of.standby > 0 && ` · ${of.standby} on standby`}
        </span>
      </header>
      {!of.leads && (
        <p class="soft">
          Another server decides{of.leader && `: ${of.leader}`}. These are the numbers of this one.
        </p>
      )}
      {made && (
        <p>
          {moved(made)} {made.why}.{made.held_by && <b> Held by: {made.held_by}.</b>}
        </p>
      )}
      {made && <Opinions of={made} />}
      {of.points.length > 0 && <Charts of={of} />}
      <h3>Pools</h3>
      <Pools of={of} />
      <Order of={of} send={send} />
      {made && (
        <details>
          <summary>The last decision was made from</summary>
          <Facts rows={inputs(made, of.signals)} />
        </details>
      )}
      <h3>Decisions</h3>
      <Moves of={of} />
    </section>
  );
}

export function Capacity(): JSX.Element {
  const { told, problem, code, again } = usePolled<Report>("/admin/scale", EVERY_MS);
  const trouble = useSignal("");
  const send = async (body: object): Promise<void> => {
    try {
      await ask("/admin/scale", { method: "POST", body });
      trouble.value = "";
    } catch (error) {
      trouble.value = error instanceof ApiError ? error.message : String(error);
    }
    again();
  };
  const found = told.value?.models ?? (code.value === "unknown_path" ? [] : undefined);
  return (
    <Page title="Capacity" note={found ? format.plural(found.length, "model that scales", "models that scale") : undefined}>
      {problem.value && !found && <Problem message={problem.value} again={again} />}
      {trouble.value && <Problem message={trouble.value} />}
      {!found && !problem.value && <Skeleton lines={4} />}
      {found && found.length === 0 && (
        <Empty title="No model scales">
          <code>models[].scale</code> says between which numbers of workers a model may go; what is decided, and why, is then shown here.
        </Empty>
      )}
      {found?.map((each) => (
        <Model key={each.model} of={each} send={(body) => void send(body)} />
      ))}
    </Page>
  );
}
