// Requests that have ended: a list that fills as they do, and the life of one of them.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { ApiError, get } from "./api";
import * as format from "./format";
import { go, href, place } from "./route";
import { type EndedRequest, RECENT_MAX, hello, recent, role } from "./store";
import { Copy, Drawer, Empty, Facts, Icon, Page, Problem, Select, Skeleton } from "./ui";

const WELL = new Set(["stop", "length", "tool_calls", "budget"]);
const SHOWN_MAX = 50;

const isWell = (each: EndedRequest): boolean => WELL.has(each.outcome);
const time = (value: number | undefined): string => (value === undefined || value < 0 ? "–" : format.ms(value));

function Outcome({ of }: { of: EndedRequest }): JSX.Element {
  const tone = isWell(of) ? "good" : of.outcome === "abort" || of.outcome === "limited" ? "off" : of.outcome === "rejected" ? "warn" : "bad";
  return (
    <span class={`state ${tone}`}>
      <i aria-hidden="true" />
      {of.outcome}
    </span>
  );
}

/** Queue and prefill of one request as a bar, to the same scale for every row. */
function Shape({ of, scale }: { of: EndedRequest; scale: number }): JSX.Element {
  const start = of.dispatched_ms ?? -1;
  const first = of.ttft_ms ?? -1;
  const parts: [string, number, number][] = [];
  if (start >= 0 && first >= 0) parts.push(["queue", 0, start], ["prefill", start, first]);
  return (
    <span class="shape" aria-hidden="true">
      {parts.map(([color, from, to]) => (
        <i key={color} class={`b-${color}`} style={{ left: `${Math.min(100, (from / scale) * 100)}%`, width: `${Math.max(0.4, Math.min(100, ((to - from) / scale) * 100))}%` }} />
      ))}
    </span>
  );
}

interface Filter {
  text: string;
  model: string;
  tenant: string;
  outcome: string;
}

function matches(each: EndedRequest, filter: Filter): boolean {
  if (filter.model && each.model !== filter.model) return false;
  if (filter.tenant && each.tenant !== filter.tenant) return false;
  if (filter.outcome === "answered" && !isWell(each)) return false;
  if (filter.outcome === "not" && isWell(each)) return false;
  if (filter.outcome === "late" && !((each.ttft_ms ?? 0) > (hello.value?.ttft_target_ms || 500))) return false;
  const text = filter.text.trim().toLowerCase();
  return !text || [each.id, each.request_id, each.worker, each.key_prefix, each.error].some((word) => word?.toLowerCase().includes(text));
}

const names = (list: EndedRequest[], of: (each: EndedRequest) => string | undefined): [string, string][] => [...new Set(list.map(of))].filter((each): each is string => !!each).sort().map((each) => [each, each]);

/** The ends of a long id: ids of one process differ in their last digits. */
const short = (id: string): string => (id.length > 24 ? `${id.slice(0, 10)}…${id.slice(-10)}` : id);

export function Requests(): JSX.Element {
  const filter = useSignal<Filter>({ text: "", model: "", tenant: "", outcome: "" });
  const held = useSignal<EndedRequest[] | null>(null);
  const isAdmin = role.value === "admin";
  const all = held.value ?? recent.value;
  const found = all.filter((each) => matches(each, filter.value));
  const shown = found.slice(0, SHOWN_MAX);
  const scale = Math.max(1, ...shown.map((each) => each.ttft_ms ?? 0));
  const chosen = place.value.rest;
  const set = (part: Partial<Filter>): void => void (filter.value = { ...filter.value, ...part });
  const search = filter.value.text.trim();
  return (
    <div class={`split ${chosen ? "open" : ""}`}>
      <Page
        title="Requests"
        note={isAdmin ? "As they end, in all gateway processes" : "Yours, as they end"}
        actions={
          <button type="button" aria-pressed={held.value !== null} onClick={() => (held.value = held.value ? null : recent.value)}>
            <Icon name={held.value ? "play" : "pause"} size={15} />
            {held.value ? "Follow" : "Hold"}
          </button>
        }
      >
        <form
          class="filters"
          role="search"
          onSubmit={(event) => {
            event.preventDefault();
            if (search) go("requests", found[0] && shown.length === 1 ? found[0].id : search);
          }}
        >
          <label class="search">
            <Icon name="search" size={16} />
            <span class="hidden">Find by request id, worker, key or error</span>
            <input type="search" placeholder="x-request-id, chatcmpl-…, worker, key, error" value={filter.value.text} onInput={(event) => set({ text: event.currentTarget.value })} spellcheck={false} />
          </label>
          <Select label="Model" value={filter.value.model} options={[["", "All"], ...names(all, (each) => each.model)]} onChange={(model) => set({ model })} />
          {isAdmin && <Select label="Tenant" value={filter.value.tenant} options={[["", "All"], ...names(all, (each) => each.tenant)]} onChange={(tenant) => set({ tenant })} />}
          <Select
            label="Ended"
            value={filter.value.outcome}
            options={[
              ["", "Anyhow"],
              ["answered", "Answered"],
              ["not", "Not answered"],
              ["late", "Late first token"],
            ]}
            onChange={(outcome) => set({ outcome })}
          />
        </form>
        {all.length === 0 ? (
          <Empty title="No request has ended yet">
            They appear here as they end. Send one from the <a href={href("playground")}>playground</a>.
          </Empty>
        ) : shown.length === 0 ? (
          <Empty title="Nothing matches">{search ? "Press Enter to ask the server for this id: it also knows decisions of the last hour." : "Of the requests that this page has seen, none is like that."}</Empty>
        ) : (
          <div class="scroll" tabIndex={0} role="region" aria-label="The requests">
            <table class="requests">
              <colgroup>
                <col class="w-time" />
                <col class="w-id" />
                <col class="w-how" />
                <col class="w-name" />
                {isAdmin && <col class="w-name" />}
                <col class="w-in in-out" />
                <col class="w-num" />
                <col class="w-num" />
                <col class="w-shape" />
              </colgroup>
              <thead>
                <tr>
                  <th scope="col">Ended</th>
                  <th scope="col">Request</th>
                  <th scope="col">How</th>
                  <th scope="col">Model</th>
                  {isAdmin && <th scope="col">Tenant</th>}
                  <th scope="col" class="right in-out">In → out</th>
                  <th scope="col" class="right">Total</th>
                  <th scope="col" class="right">TTFT</th>
                  <th scope="col" class="shape-head">
                    <span class="legend">
                      Until then <i class="solid c-queue" /> queue <i class="solid c-prefill" /> prefill
                    </span>
                  </th>
                </tr>
              </thead>
              <tbody>
                {shown.map((each) => (
                  <tr key={each.number} aria-current={each.id === chosen ? "true" : undefined}>
                    <td class="num soft">{format.clock(each.came_ms + each.total_ms)}</td>
                    <th scope="row">
                      {isAdmin ? (
                        <a class="mono" href={href("requests", each.id)} title={each.id}>
                          {short(each.id)}
                        </a>
                      ) : (
                        <span class="mono" title={each.id}>
                          {short(each.id)}
                        </span>
                      )}
                    </th>
                    <td>
                      <Outcome of={each} />
                    </td>
                    <td>{each.model}</td>
                    {isAdmin && <td>{each.tenant || "–"}</td>}
                    <td class="right num in-out">
                      {format.count(each.prompt_tokens ?? 0)} → {format.count(each.generated_tokens ?? 0)}
                    </td>
                    <td class="right num">{time(each.total_ms)}</td>
                    <td class="right num">{time(each.ttft_ms)}</td>
                    <td class="shape-cell">
                      <Shape of={each} scale={scale} />
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        )}
        {found.length > SHOWN_MAX && (
          <p class="soft small num">
            The newest {SHOWN_MAX} of {format.count(found.length)} that match; the page keeps {RECENT_MAX}.
          </p>
        )}
      </Page>
      {chosen && isAdmin && <Life name={chosen} />}
    </div>
  );
}

interface Candidate {
  worker: string;
  filtered?: string;
  score?: number;
  ttft_s?: number;
  parts?: Record<string, number>;
  facts: Record<string, unknown>;
}

interface Decision {
  request_id: string;
  model: string;
  at_ns: number;
  policy: string;
  worker: string;
  reason: string;
  hold_s: number;
  replay: { is_equal: boolean; worker: string; reason: string };
  candidates: Candidate[];
}

interface Told {
  request: EndedRequest | null;
  decisions: Decision[];
  model_choice?: { model: string; complexity: number; parts: Record<string, number>; passed_over: string[] };
}

interface Span {
  name: string;
  color: string;
  from: number;
  to: number;
  note?: string;
}

/** Where it was when, of a request that was placed several times: a worker was lost, left, or given nothing. */
function stays(request: EndedRequest, decisions: Decision[]): Span[] {
  const { admitted_ms: admitted = 0, ttft_ms: first = -1, total_ms: end } = request;
  const placed = decisions.filter((each) => each.worker).map((each) => ({ at: Math.max(admitted, (each.at_ns - request.came_ns) / 1e6), worker: each.worker }));
  const found: Span[] = [{ name: "Queue", color: "queue", from: admitted, to: placed[0]?.at ?? end }];
  placed.forEach(({ at, worker }, i) => {
    const to = placed[i + 1]?.at ?? end;
    const isMoved = first >= 0 && first < at;
    const begins = first >= at && first < to ? `, first token after ${format.ms(first - at)}` : "";
    const how = i === 0 ? `on ${worker}` : isMoved ? `went on at ${worker}` : `tried again on ${worker}`;
    found.push({ name: i === 0 ? "Worker" : isMoved ? "Moved" : "Again", color: isMoved || begins ? "decode" : "prefill", from: at, to, note: how + begins });
  });
  return found;
}

function prefillNote(request: EndedRequest): string {
  const tokens = format.count(request.prompt_tokens ?? 0);
  const cached = request.cached_tokens ? `${format.count(request.cached_tokens)} of ${tokens} tokens cached` : `${tokens} tokens`;
  if (!request.prefill_chunks) return cached;
  const computed = request.cached_tokens ? `, ${format.count(request.computed_tokens ?? 0)} computed` : "";
  return `${cached}${computed} in ${format.plural(request.prefill_chunks, "chunk")}`;
}

/** What the request did when, from its moments. */
function spans(request: EndedRequest, decisions: Decision[]): Span[] {
  const found: Span[] = [];
  const { limits_ms: limits = -1, admitted_ms: admitted = -1, dispatched_ms: dispatched = -1, ttft_ms: first = -1, total_ms: end } = request;
  const passed = admitted < 0 ? end : admitted;
  found.push({ name: "Admit", color: "gray", from: 0, to: limits < 0 ? passed : limits, note: limits < 0 ? "checks" : "checks, template, tokens" });
  if (limits >= 0) found.push({ name: "Limits", color: "kv", from: limits, to: passed, note: admitted < 0 ? `refused: ${request.error ?? request.outcome}` : "rates, budgets, admission" });
  if (admitted < 0) return found;
  if ((request.attempts ?? 0) > 1 && decisions.length > 1) return [...found, ...stays(request, decisions)];
  const started = dispatched < 0 ? end : dispatched;
  found.push({ name: "Queue", color: "queue", from: admitted, to: started });
  if (dispatched < 0) return found;
  const begun = Math.min(started + Math.max(0, request.worker_queue_ms ?? 0), first < 0 ? end : first);
  if (begun - started > 0.005) found.push({ name: "Worker", color: "queue", from: started, to: begun, note: `waits at ${request.worker}` });
  found.push({ name: "Prefill", color: "prefill", from: begun, to: first < 0 ? end : first, note: prefillNote(request) });
  if (first >= 0) found.push({ name: "Decode", color: "decode", from: first, to: end, note: `${format.count(request.generated_tokens ?? 0)} tokens${request.tpot_ms && request.tpot_ms > 0 ? `, ${format.ms(request.tpot_ms)} each` : ""}` });
  return found;
}

function Waterfall({ request, decisions }: { request: EndedRequest; decisions: Decision[] }): JSX.Element {
  const whole = Math.max(request.total_ms, 0.01);
  const at = (value: number): string => `${Math.max(0, Math.min(100, (value / whole) * 100)).toFixed(2)}%`;
  const marks = decisions.map((each) => ({ at: (each.at_ns - request.came_ns) / 1e6, text: `${each.worker || "no worker"} (${each.reason})` })).filter((each) => each.at >= -1 && each.at <= whole + 1);
  return (
    <section aria-label="Its life">
      <ol class="waterfall">
        {spans(request, decisions).map((each) => (
          <li key={each.name}>
            <span class="wf-name">{each.name}</span>
            <span class="wf-bar">
              <i class={`b-${each.color}`} style={{ left: at(each.from), width: `max(2px, ${at(Math.max(0, each.to - each.from))})` }} />
              {each.name === "Queue" && marks.map((mark, i) => <b key={i} style={{ left: at(mark.at) }} title={`placed on ${mark.text}`} />)}
            </span>
            <span class="wf-time num">{format.ms(Math.max(0, each.to - each.from))}</span>
            {each.note && <span class="wf-note soft">{each.note}</span>}
          </li>
        ))}
      </ol>
      <p class="wf-axis soft num">
        <span>0</span>
        <span>{format.ms(whole)}</span>
      </p>
      {((request.attempts ?? 0) > 1 || (request.migrations ?? 0) > 0) && (
        <p class="soft small">
          It took {format.plural(request.attempts ?? 0, "attempt")}
          {request.migrations ? `, of which ${request.migrations} continued another worker's answer` : ""}.
        </p>
      )}
    </section>
  );
}

const PART_COLORS = ["queue", "prefill", "decode", "kv", "gray", "bad", "ink"];

function Placement({ decision, number }: { decision: Decision; number: number }): JSX.Element {
  const most = Math.max(1e-9, ...decision.candidates.map((each) => Object.values(each.parts ?? {}).reduce((all, part) => all + Math.max(0, part), 0)));
  const parts = [...new Set(decision.candidates.flatMap((each) => Object.keys(each.parts ?? {})))].filter((name) => decision.candidates.some((each) => (each.parts?.[name] ?? 0) > most * 0.002));
  return (
    <section class="placement">
      <h3>
        Placement {number}: {decision.worker || "no worker"} <span class="soft">({decision.reason}{decision.hold_s ? `, held ${format.ms(decision.hold_s * 1000)}` : ""}, policy {decision.policy})</span>
      </h3>
      <ul class="legend">
        {parts.map((name, i) => (
          <li key={name}>
            <i class={`solid c-${PART_COLORS[i % PART_COLORS.length]}`} />
            {name.replace(/_s$/, "").replaceAll("_", " ")}
          </li>
        ))}
      </ul>
      <ol class="candidates">
        {decision.candidates.map((each) => (
          <li key={each.worker} class={each.worker === decision.worker ? "picked" : ""}>
            <span class="cand-name">{each.worker}</span>
            {each.filtered ? (
              <span class="soft">not possible: {each.filtered}</span>
            ) : (
              <>
                <span class="cand-bar" title={Object.entries(each.parts ?? {}).map(([name, part]) => `${name} ${part}`).join(", ")}>
                  {parts.map((name, i) => (
                    <i key={name} class={`b-${PART_COLORS[i % PART_COLORS.length]}`} style={{ width: `${(Math.max(0, each.parts?.[name] ?? 0) / most) * 100}%` }} />
                  ))}
                </span>
                <span class="num cand-score">{(each.score ?? 0).toPrecision(3)}</span>
              </>
            )}
          </li>
        ))}
      </ol>
      {!decision.replay.is_equal && <Problem message={`Decided again from the same facts it goes to ${decision.replay.worker || "no worker"}: the code has changed since.`} />}
    </section>
  );
}

function Life({ name }: { name: string }): JSX.Element {
  const told = useSignal<Told | null>(null);
  const problem = useSignal("");
  useEffect(() => {
    const stop = new AbortController();
    told.value = null;
    problem.value = "";
    get<Told>(`/admin/requests/${encodeURIComponent(name)}`, { signal: stop.signal }).then(
      (found) => (told.value = found),
      (error: unknown) => {
        if (!stop.signal.aborted) problem.value = error instanceof ApiError ? error.message : String(error);
      },
    );
    return () => stop.abort();
  }, [name]);
  const found = told.value;
  const request = found?.request;
  const rows: [string, JSX.Element | string][] = [];
  if (request) {
    rows.push(["Ended", <Outcome of={request} />], ["Came", format.date(request.came_ms)]);
    if (request.error) rows.push(["Error", request.error]);
    rows.push(["Model", request.requested ? `${request.model} (asked for ${request.requested})` : request.model]);
    if (request.worker) rows.push(["Worker", <a href={href("fleet", request.worker)}>{request.worker}</a>]);
    rows.push(["Tenant", [request.tenant || "–", request.tier, request.band].filter(Boolean).join(" · ")]);
    if (request.key_prefix) rows.push(["Key", <code>{request.key_prefix}</code>]);
    rows.push(["HTTP", `${request.status}, ${request.endpoint}`]);
    if (request.request_id) rows.push(["Answer's id", <code>{request.request_id}</code>]);
    if (request.cost_micros) rows.push(["Cost", <span class="num">{format.money(request.cost_micros)}</span>]);
  }
  const id = request?.request_id || found?.decisions[0]?.request_id || "";
  return (
    <Drawer title={name} sub={request ? `${format.ms(request.total_ms)} in all` : undefined} onClose={() => go("requests")}>
      {problem.value && <Problem message={problem.value} />}
      {!found && !problem.value && <Skeleton lines={5} />}
      {request && <Waterfall request={request} decisions={found.decisions} />}
      {request && <Facts rows={rows} />}
      {found && !request && <p class="soft">It ended long ago, or before a restart: what was decided about it is still known.</p>}
      {found?.model_choice && (
        <p>
          Asked for <code>auto</code>: complexity {found.model_choice.complexity.toFixed(2)} chose <b>{found.model_choice.model}</b>.
        </p>
      )}
      {found?.decisions.map((each, i) => <Placement key={i} decision={each} number={i + 1} />)}
      {id && (
        <section>
          <h3>The same in a terminal, and decided again</h3>
          <p class="command">
            <code>penstock explain {id} --replay</code>
            <Copy text={`penstock explain ${id} --replay`} />
          </p>
        </section>
      )}
    </Drawer>
  );
}
