// The audit trail: what happened to the server and who did it, newest first.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { ApiError, get } from "./api";
import * as format from "./format";
import { usePolled } from "./poll";
import { href } from "./route";
import { Empty, Problem, Select, Skeleton } from "./ui";

interface AuditEvent {
  number: number;
  at_ms: number;
  kind: string;
  what: string;
  about?: string;
  why?: string;
  by?: string;
}

interface Report {
  events: AuditEvent[];
  total: number;
}

const EVERY_MS = 5000;
const SHOWN = 100;
const TONES: Record<string, string> = { admin: "info", alert: "bad", worker: "drain", config: "warn", server: "off" };

function Row({ event }: { event: AuditEvent }): JSX.Element {
  return (
    <tr>
      <td class="num soft">{format.date(event.at_ms)}</td>
      <td>
        <span class={`state ${TONES[event.kind] ?? "off"}`}>
          <i aria-hidden="true" />
          {event.kind}
        </span>
      </td>
      <th scope="row">{event.what}</th>
      <td class="wrap">{event.kind === "worker" && event.about ? <a href={href("fleet", event.about)}>{event.about}</a> : event.about}</td>
      <td class="mono">{event.by}</td>
      <td class="wrap soft">{event.why}</td>
    </tr>
  );
}

export function Trail(): JSX.Element {
  const kind = useSignal("");
  const older = useSignal<AuditEvent[]>([]);
  const trouble = useSignal("");
  const path = `/admin/audit?most=${SHOWN}${kind.value ? `&kind=${kind.value}` : ""}`;
  const { told, problem, again } = usePolled<Report>(path, EVERY_MS);
  const found = told.value;
  const newest = found?.events ?? [];
  const known = new Set(newest.map((each) => each.number));
  const events = [...newest, ...older.value.filter((each) => !known.has(each.number))];
  const more = async (): Promise<void> => {
    try {
      const report = await get<Report>(`${path}&before=${events[events.length - 1]?.number ?? 0}`);
      older.value = [...older.value, ...report.events];
      trouble.value = "";
    } catch (error) {
      trouble.value = error instanceof ApiError ? error.message : String(error);
    }
  };
  return (
    <section class="card">
      <header class="row spread">
        <h2>Audit trail</h2>
        <Select
          label="Show"
          value={kind.value}
          options={[
            ["", "Everything"],
            ["admin", "What admins did"],
            ["alert", "Alerts"],
            ["worker", "Workers"],
            ["config", "Configurations"],
            ["server", "Starts and stops"],
          ]}
          onChange={(value) => {
            older.value = [];
            told.value = null;
            kind.value = value;
          }}
        />
      </header>
      {(problem.value || trouble.value) && <Problem message={problem.value || trouble.value} again={again} />}
      {!found && !problem.value && <Skeleton lines={3} />}
      {found && events.length === 0 && <Empty title="Nothing of the kind has happened" />}
      {events.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="The audit trail">
          <table class="trail">
            <thead>
              <tr>
                <th scope="col">When</th>
                <th scope="col">Kind</th>
                <th scope="col">What</th>
                <th scope="col">About</th>
                <th scope="col">By key</th>
                <th scope="col">Why</th>
              </tr>
            </thead>
            <tbody>
              {events.map((each) => (
                <Row key={each.number} event={each} />
              ))}
            </tbody>
          </table>
        </div>
      )}
      {found && events.length < found.total && (
        <p>
          <button type="button" class="quiet" onClick={() => void more()}>
            Older ones
          </button>
          <span class="soft small num"> {format.count(events.length)} of {format.count(found.total)} that are kept</span>
        </p>
      )}
    </section>
  );
}
