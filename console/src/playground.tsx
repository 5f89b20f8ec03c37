// Chat with the served models: one, or two side by side, with what it costs in time and how sure each token was.
import { signal, useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { ApiError, ask, events, get, key } from "./api";
import * as format from "./format";
import { models as served, own, role } from "./store";
import { Copy, Empty, Icon, Page, Problem, Segmented, Select } from "./ui";

interface Piece {
  text: string;
  /** Of the token; null: it was not told. */
  logprob: number | null;
  others: string;
}

/** A call of a tool, as the model writes it. */
interface Call {
  id: string;
  name: string;
  args: string;
}

interface Turn {
  role: "user" | "assistant" | "tool";
  pieces: Piece[];
  /** Its reasoning, which is no part of the answer. */
  thought?: Piece[];
  calls?: Call[];
  /** Of a tool's result: which call it answers. */
  answers?: Call;
  facts?: { ttftMs: number; tokens: number; prompt: number; seconds: number; id: string; finish: string };
  problem?: string;
}

interface Settings {
  system: string;
  temperature: string;
  maxTokens: string;
  logprobs: boolean;
  schema: string;
  tools: string;
}

/** The key for /v1, where the one that the page was signed in with is not a tenant's. */
const chatKey = signal("");
const names = signal<string[]>([]);
const problem = signal("");
const draft = signal("");
const settings = signal<Settings>({ system: "", temperature: "", maxTokens: "256", logprobs: true, schema: "", tools: "" });

class Side {
  readonly model = signal("");
  readonly turns = signal<Turn[]>([]);
  readonly busy = signal(false);
  private stop: AbortController | null = null;

  halt(): void {
    this.stop?.abort();
  }

  /** The calls that wait for their results. */
  get open(): Call[] {
    const last = this.turns.value[this.turns.value.length - 1];
    return this.busy.value || last?.problem ? [] : (last?.calls ?? []);
  }

  /** Say something more: a message, or what the called tools gave. */
  async send(...said: Turn[]): Promise<void> {
    const asked = [...this.turns.peek().filter((turn) => !turn.problem), ...said];
    const answer: Turn = { role: "assistant", pieces: [] };
    this.turns.value = [...asked, answer];
    this.busy.value = true;
    const stop = (this.stop = new AbortController());
    const began = performance.now();
    let first = 0;
    let tokens = 0;
    let painting = false;
    const show = (part: Partial<Turn>): void => {
      Object.assign(answer, part);
      if (painting) return;
      painting = true; // At most one drawing for each frame, however fast the tokens come.
      requestAnimationFrame(() => {
        painting = false;
        this.turns.value = [...this.turns.peek().slice(0, -1), { ...answer }];
      });
    };
    const facts = { ttftMs: 0, tokens: 0, prompt: 0, seconds: 0, id: "", finish: "" };
    try {
      const reply = await ask("/v1/chat/completions", { body: bodyOf(this.model.peek(), asked, true), key: chatKey.peek() || key.peek(), signal: stop.signal });
      facts.id = reply.headers.get("x-request-id") ?? "";
      for await (const event of events(reply)) {
        if (event.data === "[DONE]") break;
        const chunk = JSON.parse(event.data) as Chunk;
        if (chunk.error) throw new ApiError(200, "", chunk.error.message);
        if (chunk.usage) Object.assign(facts, { tokens: chunk.usage.completion_tokens, prompt: chunk.usage.prompt_tokens });
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        if (choice.finish_reason) facts.finish = choice.finish_reason;
        const calls = withCalls(answer.calls ?? [], choice.delta?.tool_calls ?? []);
        const told = choice.logprobs?.content;
        const thinks = !!choice.delta?.reasoning_content;
        const said = choice.delta?.content || choice.delta?.reasoning_content || "";
        const fresh = told?.length ? told.map((each) => ({ text: each.token, logprob: each.logprob, others: othersOf(each) })) : said ? [{ text: said, logprob: null, others: "" }] : [];
        if (!fresh.length && !choice.delta?.tool_calls?.length) continue;
        if (!first) first = performance.now();
        tokens += told?.length ?? 1;
        facts.ttftMs = first - began;
        facts.seconds = (performance.now() - first) / 1000;
        if (!chunk.usage) facts.tokens = tokens;
        show({ ...(thinks ? { thought: [...(answer.thought ?? []), ...fresh] } : { pieces: [...answer.pieces, ...fresh] }), calls, facts: { ...facts } });
      }
      show({ facts: { ...facts } });
    } catch (error) {
      if (!stop.signal.aborted) show({ problem: error instanceof ApiError ? error.message : String(error), facts: { ...facts } });
      if (error instanceof ApiError && error.status === 401) problem.value = error.message;
    }
    this.busy.value = false;
  }
}

interface Told {
  token: string;
  logprob: number;
  top_logprobs?: { token: string; logprob: number }[];
}

interface Chunk {
  error?: { message: string };
  usage?: { prompt_tokens: number; completion_tokens: number };
  choices?: { finish_reason?: string; delta?: { content?: string; reasoning_content?: string; tool_calls?: CallDelta[] }; logprobs?: { content?: Told[] } }[];
}

interface CallDelta {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

/** Calls with what a chunk adds to them. */
function withCalls(calls: Call[], deltas: CallDelta[]): Call[] {
  const found = [...calls];
  for (const { index, id, function: part } of deltas) {
    const known = found[index] ?? { id: "", name: "", args: "" };
    found[index] = { id: id ?? known.id, name: known.name + (part?.name ?? ""), args: known.args + (part?.arguments ?? "") };
  }
  return found;
}

const saying = (role: Turn["role"], text: string): Turn => ({ role, pieces: [{ text, logprob: null, others: "" }] });

function othersOf(told: Told): string {
  const listed = (told.top_logprobs ?? []).map((each) => `${JSON.stringify(each.token)} ${format.percent(Math.exp(each.logprob))}`);
  return listed.length ? listed.join("  ·  ") : `${format.percent(Math.exp(told.logprob))}`;
}

const textOf = (turn: Turn): string => turn.pieces.map((piece) => piece.text).join("");

/** A turn as the API has it. */
function messageOf(turn: Turn): Record<string, unknown> {
  const message: Record<string, unknown> = { role: turn.role, content: textOf(turn) };
  if (turn.calls?.length) message["tool_calls"] = turn.calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
  if (turn.answers) message["tool_call_id"] = turn.answers.id;
  return message;
}

/** What was pasted: one tool or a list, each as the API has it or its function alone. */
function toolsOf(text: string): unknown[] {
  const given = JSON.parse(text) as unknown;
  return (Array.isArray(given) ? given : [given]).map((each: { function?: unknown }) => (each.function ? each : { type: "function", function: each }));
}

/** What is wrong with the options; empty: nothing. */
function wrongOptions({ schema, tools }: Settings): string {
  for (const [name, text] of [
    ["schema", schema],
    ["tools", tools],
  ] as const) {
    try {
      if (text.trim()) JSON.parse(text);
    } catch (error) {
      return `The ${name} in Options ${name === "tools" ? "are" : "is"} not JSON: ${(error as Error).message}`;
    }
  }
  return "";
}

function bodyOf(model: string, turns: Turn[], stream: boolean): Record<string, unknown> {
  const { system, temperature, maxTokens, logprobs, schema, tools } = settings.peek();
  const messages = turns.map(messageOf);
  if (system.trim()) messages.unshift({ role: "system", content: system });
  const body: Record<string, unknown> = { model, messages };
  if (Number(maxTokens) > 0) body["max_tokens"] = Number(maxTokens);
  if (temperature !== "" && Number.isFinite(Number(temperature))) body["temperature"] = Number(temperature);
  if (logprobs) Object.assign(body, { logprobs: true, top_logprobs: 3 });
  if (schema.trim()) body["response_format"] = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) as unknown, strict: true } };
  if (tools.trim()) body["tools"] = toolsOf(tools);
  if (stream) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  return body;
}

/** A token's colour by how likely it was: none at 100 %, warmer the less likely. */
function toneOf(logprob: number | null): string {
  if (logprob === null) return "";
  const share = Math.exp(logprob);
  return share > 0.9 ? "" : share > 0.6 ? "p1" : share > 0.3 ? "p2" : share > 0.1 ? "p3" : "p4";
}

/** Arguments over several lines, once they are whole. */
function pretty(args: string): string {
  try {
    return JSON.stringify(JSON.parse(args), null, 2);
  } catch {
    return args;
  }
}

/** What the called tools gave: the model goes on with it. */
function Results({ side }: { side: Side }): JSX.Element {
  const given = useSignal<string[]>([]);
  return (
    <form
      class="results"
      onSubmit={(event) => {
        event.preventDefault();
        const results = side.open.map((call, i) => ({ ...saying("tool", given.value[i] ?? ""), answers: call }));
        given.value = [];
        void side.send(...results);
      }}
    >
      {side.open.map((call, i) => (
        <label key={call.id || i}>
          Result of {call.name}
          <input
            class="mono"
            value={given.value[i] ?? ""}
            onInput={(event) => {
              const now = [...given.value];
              now[i] = event.currentTarget.value;
              given.value = now;
            }}
          />
        </label>
      ))}
      <button type="submit">Send {side.open.length > 1 ? "results" : "the result"}</button>
    </form>
  );
}

const SPEAKERS = { user: "You", assistant: "The model", tool: "A tool" };
const sides = [new Side(), new Side()];
const pair = signal(false);

const Pieces = ({ of }: { of: Piece[] }): JSX.Element => (
  <>
    {of.map((piece, i) => {
      const tone = toneOf(piece.logprob);
      return tone || piece.others ? (
        <span key={i} class={tone} title={piece.others || undefined}>
          {piece.text}
        </span>
      ) : (
        piece.text
      );
    })}
  </>
);

function Bubble({ turn }: { turn: Turn }): JSX.Element {
  const { facts } = turn;
  const rate = facts && facts.tokens > 1 && facts.seconds > 0 ? (facts.tokens - 1) / facts.seconds : 0;
  return (
    <li class={`turn ${turn.role}`}>
      <span class="hidden">{SPEAKERS[turn.role]}:</span>
      {turn.answers && <p class="soft small">Result of {turn.answers.name}</p>}
      {turn.thought && (
        <details class="thought" open={turn.pieces.length === 0}>
          <summary>Reasoning</summary>
          <p class="said soft">
            <Pieces of={turn.thought} />
          </p>
        </details>
      )}
      <p class="said">
        <Pieces of={turn.pieces} />
        {turn.role === "assistant" && turn.pieces.length === 0 && !turn.thought && !turn.calls?.length && !turn.problem && <span class="soft">…</span>}
      </p>
      {turn.calls?.map((call, i) => (
        <div class="call" key={i}>
          <b>{call.name}</b>
          <pre tabIndex={0}>{pretty(call.args)}</pre>
        </div>
      ))}
      {turn.problem && <Problem message={turn.problem} />}
      {facts && facts.ttftMs > 0 && (
        <p class="turn-facts num soft">
          <span>TTFT {format.ms(facts.ttftMs)}</span>
          {rate > 0 && <span>{format.count(Math.round(rate * 10) / 10)} tokens/s</span>}
          <span>
            {facts.prompt > 0 && `${format.count(facts.prompt)} in, `}
            {format.count(facts.tokens)} out
          </span>
          {facts.finish && facts.finish !== "stop" && <span>ended by {facts.finish}</span>}
          {facts.id && role.value === "admin" && <a href={`#/requests/${facts.id}`}>its life</a>}
        </p>
      )}
    </li>
  );
}

/** For who only wants to see it work. */
const STARTERS = ["Who are you?", "Tell me a story.", "What is the capital of France?"];

function begin(text: string): void {
  draft.value = text;
  document.getElementById("ask")?.focus();
  document.querySelector<HTMLFormElement>("form.ask")?.requestSubmit();
}

function Talk({ side, other }: { side: Side; other: boolean }): JSX.Element {
  const list = useRef<HTMLOListElement>(null);
  useEffect(() => {
    const box = list.current!;
    if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
  }, [side.turns.value]);
  return (
    <section class="talk card" aria-label={other ? "Second model" : "Model"}>
      <header>
        <Select label="Model" value={side.model.value} options={names.value.map((each) => [each, each])} onChange={(value) => (side.model.value = value)} />
      </header>
      <ol class="turns" ref={list} aria-live="polite" aria-busy={side.busy.value} tabIndex={0} aria-label="The conversation">
        {side.turns.value.length === 0 && (
          <li class="hint soft">
            <p>Ask something. Unlikely tokens are shaded: the darker, the less likely.</p>
            {!other && (
              <p class="starters">
                {STARTERS.map((each) => (
                  <button type="button" key={each} onClick={() => begin(each)}>
                    {each}
                  </button>
                ))}
              </p>
            )}
          </li>
        )}
        {side.turns.value.map((turn, i) => (
          <Bubble key={i} turn={turn} />
        ))}
      </ol>
      {side.open.length > 0 && <Results side={side} />}
    </section>
  );
}

const quoted = (text: string): string => `'${text.replaceAll("'", `'\\''`)}'`;

function AsCode(): JSX.Element {
  const kind = useSignal<"curl" | "python">("curl");
  let text: string;
  try {
    const turns = sides[0]!.turns.value.filter((turn) => !turn.problem && (turn.pieces.length || turn.calls?.length));
    const asked = turns.length ? turns.slice(0, turns.findLastIndex((turn) => turn.role !== "assistant") + 1) : [saying("user", "Hello")];
    const body = bodyOf(sides[0]!.model.value, asked, false);
    if (kind.value === "curl") {
      text = `curl ${location.origin}/v1/chat/completions \\\n  -H "Authorization: Bearer $PENSTOCK_API_KEY" \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify(body, null, 2))}`;
    } else {
      const python = (value: unknown): string => JSON.stringify(value).replace(/\btrue\b/g, "True").replace(/\bfalse\b/g, "False").replace(/\bnull\b/g, "None");
      const lines = Object.entries(body).map(([name, value]) => `    ${name}=${name === "messages" || typeof value === "object" ? `json.loads(${JSON.stringify(JSON.stringify(value))})` : python(value)},`);
      text = `import json\nimport os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=os.environ["PENSTOCK_API_KEY"])\nanswer = client.chat.completions.create(\n${lines.join("\n")}\n)\nprint(answer.choices[0].message${body["tools"] ? "" : ".content"})`;
    }
  } catch (error) {
    text = wrongOptions(settings.value) || String(error);
  }
  return (
    <details class="as-code">
      <summary>As code</summary>
      <div class="row spread">
        <Segmented
          label="Language"
          value={kind.value}
          options={[
            ["curl", "curl"],
            ["python", "Python"],
          ]}
          onChange={(value) => (kind.value = value)}
        />
        <Copy text={text} />
      </div>
      <pre tabIndex={0}>{text}</pre>
    </details>
  );
}

function Options(): JSX.Element {
  const now = settings.value;
  const set = (part: Partial<Settings>): void => void (settings.value = { ...now, ...part });
  return (
    <details class="options">
      <summary>Options</summary>
      <div class="options-grid">
        <label>
          Most tokens
          <input type="number" min="1" inputMode="numeric" value={now.maxTokens} onInput={(event) => set({ maxTokens: event.currentTarget.value })} />
        </label>
        <label>
          Temperature
          <input type="number" min="0" max="2" step="0.1" placeholder="the model's" value={now.temperature} onInput={(event) => set({ temperature: event.currentTarget.value })} />
        </label>
        <label class="check">
          <input type="checkbox" checked={now.logprobs} onChange={(event) => set({ logprobs: event.currentTarget.checked })} /> Log-probabilities
        </label>
        <label class="wide">
          System message
          <textarea rows={2} value={now.system} onInput={(event) => set({ system: event.currentTarget.value })} />
        </label>
        <label class="wide">
          JSON schema of the answer
          <textarea rows={3} class="mono" spellcheck={false} placeholder='{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}' value={now.schema} onInput={(event) => set({ schema: event.currentTarget.value })} />
        </label>
        <label class="wide">
          Tools, one or a list
          <textarea rows={3} class="mono" spellcheck={false} placeholder='{"name": "weather", "description": "The weather of a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}' value={now.tools} onInput={(event) => set({ tools: event.currentTarget.value })} />
        </label>
      </div>
    </details>
  );
}

async function lookForModels(): Promise<void> {
  try {
    const told = await get<{ data: { id: string }[] }>("/v1/models", { key: chatKey.peek() || key.peek() });
    names.value = told.data.map((each) => each.id);
    problem.value = "";
    sides.forEach((side, i) => {
      if (!names.peek().includes(side.model.peek())) side.model.value = names.peek()[Math.min(i, names.peek().length - 1)] ?? "";
    });
  } catch (error) {
    problem.value = error instanceof ApiError ? error.message : String(error);
  }
}

function NeedsKey(): JSX.Element {
  const given = useSignal("");
  return (
    <form
      class="card key-form narrow"
      onSubmit={(event) => {
        event.preventDefault();
        chatKey.value = given.value.trim();
        void lookForModels();
      }}
    >
      <h2>The playground needs a tenant's key</h2>
      <p class="soft">{chatKey.value ? problem.value : "Requests to /v1 belong to a tenant; a key that is an admin's alone may not send them."}</p>
      <label for="chat-key">A tenant's API key</label>
      <div class="row">
        <input id="chat-key" type="password" autocomplete="off" placeholder="sk-…" value={given.value} onInput={(event) => (given.value = event.currentTarget.value)} />
        <button type="submit" class="primary" disabled={!given.value.trim()}>
          Use it
        </button>
      </div>
    </form>
  );
}

export function Playground(): JSX.Element {
  const text = draft;
  const trouble = useSignal("");
  const list = served.value.map((each) => each.name).join() + (own.value?.models.length ?? "");
  useEffect(() => void lookForModels(), [list, key.value]);
  const shown = pair.value ? sides : sides.slice(0, 1);
  const busy = shown.some((side) => side.busy.value);
  const send = (): void => {
    const asked = text.value.trim();
    if (!asked || busy) return;
    trouble.value = wrongOptions(settings.peek());
    if (trouble.value) return;
    text.value = "";
    for (const side of shown) void side.send(saying("user", asked));
  };
  return (
    <Page
      title="Playground"
      actions={
        names.value.length > 0 && (
          <>
            <Segmented
              label="How many models"
              value={pair.value ? "two" : "one"}
              options={[
                ["one", "One model"],
                ["two", "Side by side"],
              ]}
              onChange={(value) => (pair.value = value === "two")}
            />
            <button type="button" disabled={busy || !shown.some((side) => side.turns.value.length)} onClick={() => shown.forEach((side) => (side.turns.value = []))}>
              New chat
            </button>
          </>
        )
      }
    >
      {problem.value && names.value.length === 0 ? (
        <NeedsKey />
      ) : names.value.length === 0 ? (
        <Empty title="No model to talk to" />
      ) : (
        <>
          <div class={`talks ${pair.value ? "two" : ""}`}>
            {shown.map((side, i) => (
              <Talk key={i} side={side} other={i > 0} />
            ))}
          </div>
          <form
            class="ask card"
            onSubmit={(event) => {
              event.preventDefault();
              send();
            }}
          >
            <label class="hidden" for="ask">
              Your message
            </label>
            <div class="row">
              <textarea
                id="ask"
                rows={2}
                placeholder="Message (Enter sends, Shift+Enter begins a line)"
                value={text.value}
                onInput={(event) => (text.value = event.currentTarget.value)}
                onKeyDown={(event) => {
                  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
                    event.preventDefault();
                    send();
                  }
                }}
              />
              {busy ? (
                <button type="button" onClick={() => shown.forEach((side) => side.halt())}>
                  <Icon name="stop" size={15} /> Stop
                </button>
              ) : (
                <button type="submit" class="primary" disabled={!text.value.trim()}>
                  <Icon name="send" size={15} /> Send
                </button>
              )}
            </div>
            {trouble.value && <Problem message={trouble.value} />}
            <Options />
            <AsCode />
          </form>
        </>
      )}
    </Page>
  );
}
