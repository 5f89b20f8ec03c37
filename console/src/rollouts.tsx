// New versions of models that are tried on a few conversations: begin one, see what it is judged by, end it.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { ApiError, ask } from "./api";
import * as format from "./format";
import { usePolled } from "./poll";
import { models } from "./store";
import { Empty, Page, Problem, Skeleton } from "./ui";

interface Reading {
  metric: string;
  canary_requests: number;
  control_requests: number;
  difference: number | null;
  low: number | null;
  high: number | null;
  margin: number;
  verdict: "open" | "fine" | "worse";
}

interface Rollout {
  id: string;
  model: string;
  baseline: string;
  candidate: string;
  state: "running" | "ready" | "promoted" | "rolled_back" | "aborted";
  why: string;
  percent: number;
  step: number;
  steps: number[];
  began_ms: number;
  step_began_ms: number;
  promotes: boolean;
  metrics: Reading[];
  shadow: number;
  trouble: string;
}

interface Report {
  rollouts: Rollout[];
}

const EVERY_MS = 2000;
const STEPS = "1, 5, 25, 50";
const STEP_MINUTES = "30";
const STATES: Record<Rollout["state"], [string, string]> = {
  running: ["info", "running"],
  ready: ["warn", "waits for a promotion"],
  promoted: ["good", "promoted"],
  rolled_back: ["bad", "taken back"],
  aborted: ["off", "aborted"],
};
const VERDICTS: Record<Reading["verdict"], string> = { open: "off", fine: "good", worse: "bad" };
/** Metrics of which less is not better: a difference either way counts. */
const BOTH_WAYS = ["length of answers", "answers cut off"];
const isLive = (found: Rollout): boolean => found.state === "running" || found.state === "ready";

/** +3.4 %, or +0.04 % where less than one is allowed, or how many times more of what would be a long number. */
function signed(share: number, margin: number): string {
  if (share >= 9.995) return `${Math.round(share + 1)}×`;
  return `${share < 0 ? "−" : "+"}${(Math.abs(share) * 100).toFixed(margin < 0.01 ? 2 : 1)} %`;
}

/** Where the difference surely lies, beside what is allowed: a line on a scale whose middle is no difference. */
function Interval({ of }: { of: Reading }): JSX.Element {
  const { low, high, difference, margin } = of;
  if (low === null || high === null || difference === null) return <span class="soft">too few requests yet</span>;
  const reach = 3 * margin;
  const x = (share: number): number => 50 + 50 * Math.max(-1, Math.min(1, share / reach));
  const words = `${of.metric}: ${signed(difference, margin)}, surely between ${signed(low, margin)} and ${signed(high, margin)}; ${signed(margin, margin)} is allowed`;
  return (
    <svg class={`interval ${of.verdict}`} viewBox="0 0 100 14" preserveAspectRatio="none" role="img" aria-label={words}>
      <title>{words}</title>
      <rect class="allowed" x={BOTH_WAYS.includes(of.metric) ? x(-margin) : 0} width={x(margin) - (BOTH_WAYS.includes(of.metric) ? x(-margin) : 0)} height={14} />
      <path class="zero" d="M50 0V14" vector-effect="non-scaling-stroke" />
      <path class="between" d={`M${x(low)} 7H${Math.max(x(high), x(low) + 0.6)}`} vector-effect="non-scaling-stroke" />
      <path class="found" d={`M${x(difference)} 2V12`} vector-effect="non-scaling-stroke" />
    </svg>
  );
}

function Figures({ of }: { of: Rollout }): JSX.Element {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={`Figures of ${of.candidate}`}>
      <table>
        <thead>
          <tr>
            <th scope="col">Metric</th>
            <th scope="col" class="right wide-only">New</th>
            <th scope="col" class="right wide-only">Old</th>
            <th scope="col" class="right">Difference</th>
            <th scope="col">Surely between</th>
            <th scope="col" class="right">Allowed</th>
            <th scope="col">Verdict</th>
          </tr>
        </thead>
        <tbody>
          {of.metrics.map((each) => (
            <tr key={each.metric}>
              <th scope="row">{each.metric}</th>
              <td class="right num wide-only">{format.count(each.canary_requests)}</td>
              <td class="right num wide-only">{format.count(each.control_requests)}</td>
              <td class="right num">{each.difference === null ? "–" : signed(each.difference, each.margin)}</td>
              <td>
                <Interval of={each} />
              </td>
              <td class="right num">{`${BOTH_WAYS.includes(each.metric) ? "±" : ""}${format.percent(each.margin)}`}</td>
              <td>
                <span class={`state ${VERDICTS[each.verdict]}`}>
                  <i aria-hidden="true" />
                  {each.verdict}
                </span>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** How far it has come: each step's share of conversations, and all of them. */
function Steps({ of }: { of: Rollout }): JSX.Element {
  const reached = of.state === "promoted" ? of.steps.length : of.step;
  const shares = [...of.steps.map((each) => `${each} %`), "all"];
  return (
    <ol class="steps" aria-label="Steps">
      {shares.map((each, i) => (
        <li key={each} class={i < reached ? "done" : i === reached ? of.state : ""} aria-current={i === reached && isLive(of) ? "step" : undefined}>
          <i aria-hidden="true" />
          {each}
        </li>
      ))}
    </ol>
  );
}

function Orders({ of, send }: { of: Rollout; send: (path: string) => void }): JSX.Element | null {
  const asks = useSignal<"" | "promote" | "abort">("");
  if (!isLive(of) && of.state !== "promoted") return null;
  if (!asks.value) {
    return (
      <div class="row">
        {isLive(of) && (
          <button type="button" class={of.state === "ready" ? "primary" : ""} onClick={() => (asks.value = "promote")}>
            Promote…
          </button>
        )}
        <button type="button" onClick={() => (asks.value = "abort")}>
          {isLive(of) ? "Abort…" : "Back to the old version…"}
        </button>
      </div>
    );
  }
  const [kept, verb] = asks.value === "promote" ? [of.candidate, "Promote"] : [of.baseline, isLive(of) ? "Abort" : "Go back"];
  return (
    <div class="confirm" role="alertdialog" aria-label={`${verb}: every conversation of ${of.model} gets ${kept}`}>
      <p>
        Every conversation of {of.model} gets <b>{kept}</b> from its next request on.
        {asks.value === "promote" && of.state === "running" && " Not every step is over."}
      </p>
      <button
        type="button"
        class={asks.value === "promote" ? "primary" : "danger"}
        onClick={() => {
          send(`/admin/rollouts/${of.model.split("/").map(encodeURIComponent).join("/")}/${asks.value}`);
          asks.value = "";
        }}
      >
        {verb}
      </button>
      <button type="button" class="quiet" onClick={() => (asks.value = "")}>
        Cancel
      </button>
    </div>
  );
}

function Badge({ of }: { of: Rollout }): JSX.Element {
  const [tone, words] = STATES[of.state];
  return (
    <span class={`state ${tone}`}>
      <i aria-hidden="true" />
      {words}
    </span>
  );
}

function Latest({ of, send }: { of: Rollout; send: (path: string) => void }): JSX.Element {
  return (
    <section class="card" aria-label={`${of.baseline} to ${of.candidate}`}>
      <header class="row spread">
        <h2>
          {of.baseline} <span class="soft">→</span> {of.candidate}
        </h2>
        <Badge of={of} />
      </header>
      <Steps of={of} />
      <p>
        {of.shadow > 0 ? `Nobody gets ${of.candidate}; requests of ${of.shadow} % of conversations are copied to it.` : `${of.percent} % of conversations get ${of.candidate}.`}
        {of.state === "running" && of.why && ` It waits for ${of.why}.`}
        {of.state !== "running" && of.why && ` ${of.why[0]!.toUpperCase()}${of.why.slice(1)}.`}
        <span class="soft">
          {" "}
          Begun {format.date(of.began_ms)}
          {isLive(of) && of.step > 0 && `, this step ${format.date(of.step_began_ms)}`}.{of.promotes && " Promoted by itself behind the last step."}
        </span>
      </p>
      {of.trouble && <p class="bad-text">{of.trouble}.</p>}
      <Figures of={of} />
      <Orders of={of} send={send} />
    </section>
  );
}

/** Everything that ended before each model's latest one. */
function Earlier({ list }: { list: Rollout[] }): JSX.Element {
  return (
    <section class="card">
      <h2>Earlier ones</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Earlier rollouts">
        <table>
          <thead>
            <tr>
              <th scope="col">Begun</th>
              <th scope="col">From</th>
              <th scope="col">To</th>
              <th scope="col">Ended</th>
              <th scope="col">Why</th>
            </tr>
          </thead>
          <tbody>
            {list.map((each) => (
              <tr key={each.id}>
                <td class="num soft">{format.date(each.began_ms)}</td>
                <td>{each.baseline}</td>
                <th scope="row">{each.candidate}</th>
                <td>
                  <Badge of={each} />
                </td>
                <td class="wrap soft">{each.why}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

/** Names with a version, of models that have several. */
function candidates(): string[] {
  const named = models.value.map((each) => each.name).filter((name) => name.includes("@"));
  const base = (name: string): string => name.slice(0, name.lastIndexOf("@"));
  return named.filter((name) => named.some((other) => other !== name && base(other) === base(name)));
}

function Begin({ found, begin }: { found: Rollout[]; begin: (body: object) => Promise<boolean> }): JSX.Element {
  const given = useSignal({ candidate: "", steps: STEPS, minutes: STEP_MINUTES, shadow: "0", promotes: false });
  const busy = found.filter(isLive).map((each) => each.model);
  const known = candidates().filter((name) => !busy.includes(name.slice(0, name.lastIndexOf("@"))));
  const chosen = known.includes(given.value.candidate) ? given.value.candidate : (known[0] ?? "");
  const set = (fields: object): void => void (given.value = { ...given.value, ...fields });
  if (!known.length) return <></>;
  return (
    <section class="card">
      <h2>Try a version</h2>
      <form
        class="inline-form"
        onSubmit={(event) => {
          event.preventDefault();
          const { steps, minutes, shadow, promotes } = given.value;
          const body = { model: chosen.slice(0, chosen.lastIndexOf("@")), candidate: chosen, steps: steps.split(",").map(Number), step_s: Number(minutes) * 60, shadow: Number(shadow), promotes };
          void begin(body).then((begun) => begun && set({ candidate: "" }));
        }}
      >
        <label>
          Version
          <select value={chosen} onChange={(event) => set({ candidate: event.currentTarget.value })}>
            {known.map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </label>
        <label>
          Steps, % of conversations
          <input value={given.value.steps} inputMode="decimal" onInput={(event) => set({ steps: event.currentTarget.value })} />
        </label>
        <label>
          Minutes a step, at most
          <input value={given.value.minutes} type="number" min="0.1" step="any" onInput={(event) => set({ minutes: event.currentTarget.value })} />
        </label>
        <label>
          Copies before that, % of conversations
          <input value={given.value.shadow} type="number" min="0" max="100" step="any" onInput={(event) => set({ shadow: event.currentTarget.value })} />
        </label>
        <label class="check">
          <input type="checkbox" checked={given.value.promotes} onChange={(event) => set({ promotes: event.currentTarget.checked })} />
          Promote it by itself
        </label>
        <button type="submit" class="primary">
          Begin
        </button>
      </form>
    </section>
  );
}

export function Rollouts(): JSX.Element {
  const { told, problem, again } = usePolled<Report>("/admin/rollouts", EVERY_MS);
  const trouble = useSignal("");
  const send = async (path: string, body: object = {}): Promise<boolean> => {
    try {
      await ask(path, { method: "POST", body });
      trouble.value = "";
      again();
      return true;
    } catch (error) {
      trouble.value = error instanceof ApiError ? error.message : String(error);
      return false;
    }
  };
  const found = told.value?.rollouts ?? [];
  const latest = found.filter((each, i) => found.findIndex((other) => other.model === each.model) === i);
  const earlier = found.filter((each) => !latest.includes(each));
  const live = found.filter(isLive).length;
  return (
    <Page title="Rollouts" note={told.value ? (live ? `${format.plural(live, "version")} on trial` : "No version on trial") : undefined}>
      {problem.value && <Problem message={problem.value} again={again} />}
      {trouble.value && <Problem message={trouble.value} />}
      {!told.value && !problem.value && <Skeleton lines={4} />}
      {told.value && (
        <>
          {latest.map((each) => (
            <Latest key={each.id} of={each} send={(path) => void send(path)} />
          ))}
          {!found.length && !candidates().length && (
            <Empty title="No model has two versions">
              Two entries of <code>models</code> with one <code>name</code> and a <code>version</code> each: then the new one can be tried here on a few conversations.
            </Empty>
          )}
          <Begin found={found} begin={(body) => send("/admin/rollouts", body)} />
          {earlier.length > 0 && <Earlier list={earlier} />}
        </>
      )}
    </Page>
  );
}
