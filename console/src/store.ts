// The live state of the page, as the server's feed tells it: one stream, and from it one signal for each worker.
import { batch, signal, type Signal } from "@preact/signals";
import { ApiError, ask, events, key } from "./api";

export type Role = "admin" | "viewer" | "tenant" | "";
export type Link = "connecting" | "live" | "lost" | "denied";

export interface ServerLine {
  version: string;
  uptime_s: number;
  connections: number;
  streams: number;
  processes: number;
  draining: boolean;
  auth: boolean;
}

export interface ModelLine {
  name: string;
  waiting: number;
  ready: number;
  workers: number;
  ttft_sum_s: number;
  ttft_count: number;
}

export interface WorkerLine {
  id: string;
  model: string;
  engine: string;
  state: string;
  stage: string;
  left_alone: string;
  epoch: number;
  address: string;
  identity: string;
  running: number | null;
  waiting: number | null;
  kv_blocks_used: number | null;
  kv_blocks_total: number | null;
  generated_tokens: number | null;
  age_s: number | null;
  adapters: string[];
  adapters_loaded: string[];
  restarts: number;
  notes: string[];
  /** Judged by probes and by its peers: well, doubted, ejected or returning. */
  standing?: string;
  /** Its steps' time over that of its peers; 1 is as they are. */
  slowness?: number | null;
  /** The verdict on its last probe. */
  probe?: string;
}

export interface EndedRequest {
  number: number;
  id: string;
  request_id?: string;
  came_ms: number;
  came_ns: number;
  endpoint: string;
  tenant?: string;
  key_prefix?: string;
  tier?: string;
  band?: string;
  model: string;
  requested?: string;
  worker?: string;
  status: number;
  outcome: string;
  error?: string;
  prompt_tokens?: number;
  cached_tokens?: number;
  generated_tokens?: number;
  limits_ms?: number;
  admitted_ms?: number;
  queue_ms?: number;
  dispatched_ms?: number;
  worker_queue_ms?: number;
  prefill_chunks?: number;
  computed_tokens?: number;
  ttft_ms?: number;
  tpot_ms?: number;
  total_ms: number;
  attempts?: number;
  migrations?: number;
  cost_micros?: number;
}

export interface ModelReady {
  name: string;
  ready: boolean;
  stage: string;
  progress: number | null;
}

export interface OwnStatus {
  tenant: string;
  tier: string;
  draining: boolean;
  auth: boolean;
  streams: number;
  spent_day_micros: number;
  spent_month_micros: number;
  models: ModelReady[];
}

interface Hello {
  role: Role;
  tenant: string;
  ttft_target_ms: number;
  tpot_target_ms: number;
}

interface FleetEvent {
  at_ms: number;
  server: ServerLine;
  models: ModelLine[];
  whole: boolean;
  workers: Record<string, Partial<WorkerLine>>;
  gone: string[];
}

/** Seconds of a worker's history that the page keeps. */
export const TRAIL = 900;

/** One worker's last quarter of an hour, a value each second. Its arrays are written in place. */
export class Trail {
  readonly at = new Float64Array(TRAIL);
  readonly rate = new Float32Array(TRAIL);
  readonly running = new Float32Array(TRAIL);
  readonly waiting = new Float32Array(TRAIL);
  readonly kv = new Float32Array(TRAIL);
  length = 0;
  private next = 0;
  private lastTokens = NaN;
  private lastAt = 0;
  private smooth = 0;

  add(at: number, worker: WorkerLine): void {
    const tokens = worker.generated_tokens ?? NaN;
    const grown = tokens - this.lastTokens;
    if (grown >= 0 && at > this.lastAt) {
      const now = (grown * 1000) / (at - this.lastAt);
      this.smooth += (now - this.smooth) * (this.length < 3 ? 1 : 0.4);
      if (this.smooth < 0.05) this.smooth = 0;
    } else if (!(grown >= 0)) this.smooth = 0; // It is new here or a new process, or says nothing.
    this.lastTokens = tokens;
    this.lastAt = at;
    const i = this.next;
    this.at[i] = at;
    this.rate[i] = grown >= 0 ? this.smooth : NaN;
    this.running[i] = worker.running ?? 0;
    this.waiting[i] = worker.waiting ?? 0;
    this.kv[i] = kvShare(worker) ?? 0;
    this.next = (i + 1) % TRAIL;
    this.length = Math.min(TRAIL, this.length + 1);
  }

  get current(): number {
    return this.smooth;
  }

  /** The last `most` values of one of its arrays, oldest first. */
  last(values: Float32Array | Float64Array, most: number): number[] {
    const size = Math.min(most, this.length);
    const found = new Array<number>(size);
    for (let i = 0; i < size; i++) found[i] = values[(this.next - size + i + TRAIL) % TRAIL]!;
    return found;
  }
}

export interface WorkerLive {
  id: string;
  now: Signal<WorkerLine>;
  trail: Trail;
}

export const link = signal<Link>("connecting");
/** Why there is no feed, as the server said it. */
export const linkProblem = signal("");
export const role = signal<Role>("");
export const hello = signal<Hello | null>(null);
export const server = signal<ServerLine | null>(null);
export const models = signal<ModelLine[]>([]);
/** Every worker, by the order of their models and ids; changes only when one comes or goes. */
export const workers = signal<WorkerLive[]>([]);
/** Grows with each event of the fleet: what depends on all workers looks at it. */
export const beat = signal(0);
export const totals = new Trail();
export const ttftMs = signal<number | null>(null);
export const recent = signal<EndedRequest[]>([]);
export const own = signal<OwnStatus | null>(null);

export const RECENT_MAX = 500;
const QUIET_MS = 12_000;
const byId = new Map<string, WorkerLive>();
let ttftSeen: { sum: number; count: number; at: number }[] = [];
let running: AbortController | null = null;

export function kvShare(worker: WorkerLine): number | null {
  if (!worker.kv_blocks_total || worker.kv_blocks_used == null) return null;
  return worker.kv_blocks_used / worker.kv_blocks_total;
}

export const workerOf = (id: string): WorkerLive | undefined => byId.get(id);

function forget(): void {
  batch(() => {
    byId.clear();
    workers.value = [];
    models.value = [];
    recent.value = [];
    own.value = server.value = hello.value = null;
    role.value = "";
    ttftMs.value = null;
    ttftSeen = [];
  });
}

function sumAll(): WorkerLine {
  const all = { generated_tokens: 0, running: 0, waiting: 0, kv_blocks_used: 0, kv_blocks_total: 0 };
  for (const { now } of byId.values()) {
    const one = now.peek();
    all.generated_tokens += one.generated_tokens ?? 0;
    all.running += one.running ?? 0;
    all.waiting += one.waiting ?? 0;
    all.kv_blocks_used += one.kv_blocks_used ?? 0;
    all.kv_blocks_total += one.kv_blocks_total ?? 0;
  }
  for (const model of models.peek()) all.waiting += model.waiting;
  return all as WorkerLine;
}

/** The mean time to first token of the answers of the last ten seconds. */
function meanTtft(at: number, told: ModelLine[]): number | null {
  const sum = told.reduce((all, each) => all + each.ttft_sum_s, 0);
  const count = told.reduce((all, each) => all + each.ttft_count, 0);
  ttftSeen = ttftSeen.filter((each) => each.at > at - 10_000 && each.count <= count);
  const first = ttftSeen[0];
  ttftSeen.push({ sum, count, at });
  return first && count > first.count ? ((sum - first.sum) / (count - first.count)) * 1000 : null;
}

export function takeFleet(event: FleetEvent): void {
  batch(() => {
    server.value = event.server;
    models.value = event.models;
    let changed = event.gone.length > 0;
    for (const id of event.gone) byId.delete(id);
    if (event.whole) {
      for (const id of [...byId.keys()]) if (!(id in event.workers)) changed = byId.delete(id) || changed;
    }
    for (const [id, fields] of Object.entries(event.workers)) {
      const known = byId.get(id);
      if (known) known.now.value = { ...known.now.peek(), ...fields };
      else {
        byId.set(id, { id, now: signal(fields as WorkerLine), trail: new Trail() });
        changed = true;
      }
    }
    for (const each of byId.values()) each.trail.add(event.at_ms, each.now.peek());
    if (changed) {
      workers.value = [...byId.values()].sort(
        (a, b) => a.now.peek().model.localeCompare(b.now.peek().model) || a.id.localeCompare(b.id, "en", { numeric: true }),
      );
    }
    totals.add(event.at_ms, sumAll());
    ttftMs.value = meanTtft(event.at_ms, event.models);
    beat.value += 1;
  });
}

export function takeRequests(ended: EndedRequest[]): void {
  recent.value = [...ended, ...recent.peek()].slice(0, RECENT_MAX);
}

function take(name: string, data: string): void {
  if (name === "fleet") takeFleet(JSON.parse(data) as FleetEvent);
  else if (name === "requests") takeRequests(JSON.parse(data) as EndedRequest[]);
  else if (name === "own") own.value = JSON.parse(data) as OwnStatus;
  else if (name === "hello") {
    const told = JSON.parse(data) as Hello;
    batch(() => {
      recent.value = [];
      hello.value = told;
      role.value = told.role;
      link.value = "live";
      linkProblem.value = "";
    });
  }
}

/** One stream until it ends. A server that says nothing for a while is taken for lost. */
async function watch(stop: AbortController): Promise<void> {
  let quiet = setTimeout(() => stop.abort(), QUIET_MS);
  try {
    const answer = await ask("/console/feed", { signal: stop.signal });
    for await (const event of events(answer)) {
      clearTimeout(quiet);
      quiet = setTimeout(() => stop.abort(), QUIET_MS);
      if (running !== stop) return;
      take(event.name, event.data);
    }
  } finally {
    clearTimeout(quiet);
  }
}

/** Follow the feed for as long as the page is there, with the key that it has now. */
export async function connect(): Promise<void> {
  running?.abort();
  forget();
  link.value = "connecting";
  let pause = 500;
  const mine = key.peek();
  for (;;) {
    const stop = (running = new AbortController());
    const since = performance.now();
    try {
      await watch(stop);
      linkProblem.value = "The server ended the stream.";
    } catch (error) {
      if (running !== stop) return;
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        batch(() => {
          forget();
          link.value = "denied";
          linkProblem.value = error.message;
        });
        return;
      }
      linkProblem.value = error instanceof ApiError ? error.message : "The server says nothing.";
    }
    if (running !== stop || key.peek() !== mine) return;
    if (performance.now() - since > 5000) pause = 500;
    if (pause > 500) link.value = "lost"; // A stream that ends by itself is opened again at once.
    await new Promise((resume) => setTimeout(resume, pause));
    if (running !== stop) return;
    pause = Math.min(pause * 2, 10_000);
  }
}

/** Take a key for this page; nothing of it outlives the page. */
export function signIn(given: string): void {
  key.value = given.trim();
  void connect();
}

export function signOut(): void {
  key.value = "";
  void connect();
}
