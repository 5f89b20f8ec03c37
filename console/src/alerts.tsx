// What fires, how fast every promise's error budget burns, and what else happened.
import type { JSX } from "preact";
import { Trail } from "./audit";
import * as format from "./format";
import { usePolled } from "./poll";
import { go, href, place } from "./route";
import { Runbook } from "./runbook";
import { models } from "./store";
import { Empty, Page, Problem, Skeleton } from "./ui";

interface Alert {
  name: string;
  severity: string;
  labels: Record<string, string>;
  since: number;
  why: string;
  summary: string;
  runbook: string;
}

interface SloWindow {
  window: string;
  total: number;
  bad: number;
  burn: number | null;
}

export interface SloRow {
  model: string;
  band: string;
  objective: string;
  target: number;
  windows: SloWindow[];
  budget_left: number | null;
}

interface Report {
  now: number;
  firing: Alert[];
  slo: SloRow[];
}

const EVERY_MS = 10_000;
const OBJECTIVES: Record<string, string> = { availability: "Availability", ttft: "TTFT in time", tpot: "TPOT in time" };
/** Burn rates from which on a budget of 30 days ends too soon, and from which on somebody is called. */
const TICKET_BURN = 1;
const PAGE_BURN = 6;

const toneOf = (severity: string): string => (severity === "page" ? "bad" : severity === "ticket" || severity === "warning" ? "warn" : "info");

const about = (labels: Record<string, string>): string =>
  Object.entries(labels)
    .map(([name, value]) => (name === "model" || name === "band" ? value : `${name} ${value}${name === "burn" ? "×" : ""}`))
    .join(" · ");

/** What tells one of an alert's rules from the others: its windows. */
const RULE = ["burn", "window"];

const without = (labels: Record<string, string>, names: string[]): Record<string, string> => Object.fromEntries(Object.entries(labels).filter(([name]) => !names.includes(name)));

const only = (labels: Record<string, string>, names: string[]): Record<string, string> => Object.fromEntries(Object.entries(labels).filter(([name]) => names.includes(name)));

/** Alerts by what they are about, each with all of its rules that fire: the most severe first, as they come. */
function grouped(alerts: Alert[]): Alert[][] {
  const groups = new Map<string, Alert[]>();
  for (const each of alerts) {
    const key = `${each.name} ${JSON.stringify(without(each.labels, RULE))}`;
    groups.set(key, [...(groups.get(key) ?? []), each]);
  }
  return [...groups.values()];
}

function One({ alert, others = [], now }: { alert: Alert; others?: Alert[]; now: number }): JSX.Element {
  return (
    <li class={`alert ${toneOf(alert.severity)}`}>
      <p class="alert-head">
        <span class={`state ${toneOf(alert.severity)}`}>
          <i aria-hidden="true" />
          {alert.severity}
        </span>
        <b>{alert.name}</b>
        <span class="soft">{about(without(alert.labels, RULE))}</span>
        <span class="soft num alert-since">{`for ${format.duration(Math.max(0, now - alert.since))}`}</span>
      </p>
      <p>{alert.why}</p>
      {others.length > 0 && (
        <details>
          <summary>{format.plural(others.length, "more rule")} of it {others.length === 1 ? "fires" : "fire"}</summary>
          <ul class="plain">
            {others.map((each, i) => (
              <li key={i} class="soft">
                {each.severity}, {about(only(each.labels, RULE))}: {each.why}
              </li>
            ))}
          </ul>
        </details>
      )}
      <p class="soft">
        {alert.summary} <a href={href("alerts", alert.name)}>What to do</a>
      </p>
    </li>
  );
}

function Burn({ told }: { told: SloWindow }): JSX.Element {
  if (told.burn === null) return <td class="right num soft">–</td>;
  const tone = told.burn >= PAGE_BURN ? "bad-text" : told.burn >= TICKET_BURN ? "warn-text" : "";
  return (
    <td class={`right num ${tone}`} title={`${told.bad} of ${told.total}`}>
      {told.burn >= 100 ? Math.round(told.burn) : told.burn.toFixed(1)}×
    </td>
  );
}

export const left = (share: number): string => (share < 0 ? `−${format.percent(-share)}` : format.percent(share));

/** What is left of the error budget of the last three days. */
function Left({ share }: { share: number | null }): JSX.Element {
  if (share === null) return <td class="right num soft">–</td>;
  return <td class={`right num ${share < 0 ? "bad-text" : share < 0.25 ? "warn-text" : ""}`}>{left(share)}</td>;
}

/** Of models that are served. History is kept for days, and by servers before this one. */
export const ofServed = (rows: SloRow[]): SloRow[] => (models.value.length ? rows.filter((row) => models.value.some((each) => each.name === row.model)) : rows);

function Budgets({ rows: all }: { rows: SloRow[] }): JSX.Element {
  const rows = ofServed(all);
  const gone = new Set(all.filter((row) => !rows.includes(row)).map((row) => row.model)).size;
  const windows = rows[0]?.windows.map((each) => each.window) ?? [];
  return (
    <section class="card">
      <h2>How fast error budgets burn</h2>
      <p class="soft small">1× spends a budget exactly by the end of its period; above that it ends sooner. Budget left is of the last three days. Point at a number for what it was made of.</p>
      <div class="scroll" tabIndex={0} role="region" aria-label="Burn rates">
        <table>
          <thead>
            <tr>
              <th scope="col">Model</th>
              <th scope="col">Band</th>
              <th scope="col">Objective</th>
              <th scope="col" class="right">Target</th>
              {windows.map((each) => (
                <th scope="col" class="right" key={each}>
                  {each}
                </th>
              ))}
              <th scope="col" class="right">Budget left</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={`${row.model}/${row.band}/${row.objective}`}>
                <th scope="row">{row.model}</th>
                <td>{row.band}</td>
                <td>{OBJECTIVES[row.objective] ?? row.objective}</td>
                <td class="right num">{(row.target * 100).toFixed(2).replace(/\.?0+$/, "")} %</td>
                {row.windows.map((each) => (
                  <Burn key={each.window} told={each} />
                ))}
                <Left share={row.budget_left} />
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {gone > 0 && <p class="soft small">{format.plural(gone, "model")} that had requests in the last three days {gone === 1 ? "is" : "are"} no longer served, and left out.</p>}
    </section>
  );
}

export function Alerts(): JSX.Element {
  const { told, problem, again } = usePolled<Report>("/admin/alerts", EVERY_MS);
  const found = told.value;
  const { rest } = place.value;
  return (
    <div class={rest ? "split open" : "split"}>
      <Page title="Alerts and decisions" note={found ? (found.firing.length ? `${format.plural(grouped(found.firing).length, "alert")} firing` : "Nothing fires") : undefined}>
        {problem.value && <Problem message={problem.value} again={again} />}
        {!found && !problem.value && <Skeleton lines={4} />}
        {found && (
          <>
            <section aria-label="Firing" aria-live="polite">
              {found.firing.length === 0 ? (
                <Empty title="Nothing fires">Every promise is kept, as far as this server sees it.</Empty>
              ) : (
                <ol class="alerts">
                  {grouped(found.firing).map(([first, ...others], i) => first && <One key={i} alert={first} others={others} now={found.now} />)}
                </ol>
              )}
            </section>
            {found.slo.length > 0 && <Budgets rows={found.slo} />}
          </>
        )}
        <Trail />
      </Page>
      {rest && <Runbook key={rest} name={rest} onClose={() => go("alerts")} />}
    </div>
  );
}
