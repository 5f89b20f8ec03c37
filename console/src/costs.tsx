// What requests cost their senders, and where the machines' money went.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import * as format from "./format";
import { usePolled } from "./poll";
import { Empty, Page, Problem, Segmented, Skeleton } from "./ui";

interface UsageLine {
  name: string;
  requests: number;
  failed: number;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  cost_micros: number;
  accelerator_cost_micros: number;
  per_million_micros: number | null;
}

interface Account {
  bill: number;
  requests: number;
  platform: number;
  idle: number;
  reserve: number;
  tokens: number;
  per_million: number | null;
  floor_per_million: number | null;
  over_floor: number | null;
}

interface Report {
  by: Group;
  since: string;
  currency: string;
  is_priced: boolean;
  usage: UsageLine[];
  num_lines: number;
  total: UsageLine;
  machines: { name: string; account: Account }[];
  machines_total: Account | null;
}

type Group = "tenant" | "model" | "adapter" | "day";

const EVERY_MS = 15_000;
const GROUPS: [Group, string][] = [["tenant", "Tenant"], ["model", "Model"], ["adapter", "Adapter"], ["day", "Day"]];
const SPANS: [string, string][] = [["1", "Today"], ["7", "7 days"], ["30", "30 days"], ["92", "92 days"]];
/** From here on `CostOverFloor` fires. */
const FAR_OVER_FLOOR = 2;
const PARTS = ["requests", "platform", "idle", "reserve"] as const;
const COLOURS: Record<(typeof PARTS)[number], string> = { requests: "c-decode", platform: "c-violet", idle: "c-pale", reserve: "c-warn" };
const NONE: Partial<Record<Group, string>> = { adapter: "no adapter", tenant: "no tenant" };

/** Units of the currency, to three figures: the floor of a million tokens may be a thousandth. */
const amount = (value: number | null): string => (value === null ? "–" : value === 0 ? "0" : value >= 1 ? format.money(value * 1e6) : String(Number(value.toPrecision(3))));
const times = (value: number | null): string => (value === null ? "–" : `${value >= 100 ? Math.round(value) : value.toFixed(1)}×`);
const isFarOver = (found: Account): boolean => found.over_floor !== null && found.over_floor > FAR_OVER_FLOOR;

function Kpi({ name, value, note, warn }: { name: string; value: string; note: string; warn?: boolean }): JSX.Element {
  return (
    <div class={`kpi ${warn ? "warn" : ""}`}>
      <span class="kpi-name">{name}</span>
      <span class="kpi-value num">{value}</span>
      <span class="kpi-note">{note}</span>
    </div>
  );
}

/** What share of a bill went where, as one bar and in words. */
function Shares({ of, name }: { of: Account; name: string }): JSX.Element {
  const shares = PARTS.map((part) => [part, of.bill ? of[part] / of.bill : 0] as const);
  const words = shares.map(([part, share]) => `${part} ${format.percent(share)}`).join(", ");
  return (
    <svg class="shares" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label={`${name}: ${words}`}>
      <title>{words}</title>
      {shares.map(([part, share], i) => {
        const before = shares.slice(0, i).reduce((sum, [, each]) => sum + each, 0);
        return <rect key={part} class={COLOURS[part]} x={100 * before} width={100 * Math.max(0, share)} height={8} />;
      })}
    </svg>
  );
}

function Machines({ told }: { told: Report }): JSX.Element {
  const total = told.machines_total;
  if (!total) {
    return (
      <section class="card">
        <h2>Machines</h2>
        <Empty title="No machine has a price">
          <code>prices.accelerators</code> says what one worker's machine costs an hour, by model. Then every second of it is counted here.
        </Empty>
      </section>
    );
  }
  return (
    <section class="card">
      <h2>The cost of machines</h2>
      <div class="kpis">
        <Kpi name="Bill" value={amount(total.bill)} note={told.currency} />
        <Kpi name="1M tokens" value={amount(total.per_million)} note={`${told.currency}, of ${format.count(total.tokens)} tokens`} />
        <Kpi name="At the least" value={amount(total.floor_per_million)} note={total.floor_per_million === null ? "these engines do not tell" : `${told.currency}, in full batches`} />
        <Kpi name="Times the least" value={times(total.over_floor)} note={`above ${FAR_OVER_FLOOR}× an alert fires`} warn={isFarOver(total)} />
      </div>
      <ul class="legend" aria-hidden="true">
        {PARTS.map((part) => (
          <li key={part}>
            <i class={`solid ${COLOURS[part]}`} /> {part}
          </li>
        ))}
      </ul>
      <div class="scroll" tabIndex={0} role="region" aria-label="The machines">
        <table>
          <thead>
            <tr>
              <th scope="col">{told.by === "day" ? "Day" : "Model"}</th>
              <th scope="col" class="right">Bill ({told.currency})</th>
              <th scope="col">Went to</th>
              {PARTS.map((part) => (
                <th scope="col" class="right" key={part}>
                  {part}
                </th>
              ))}
              <th scope="col" class="right">1M tokens</th>
              <th scope="col" class="right">At the least</th>
              <th scope="col" class="right">Times that</th>
            </tr>
          </thead>
          <tbody>
            {told.machines.map(({ name, account }) => (
              <tr key={name}>
                <th scope="row">{name}</th>
                <td class="right num">{amount(account.bill)}</td>
                <td>
                  <Shares of={account} name={name} />
                </td>
                {PARTS.map((part) => (
                  <td class="right num" key={part}>
                    {account.bill ? format.percent(account[part] / account.bill) : "–"}
                  </td>
                ))}
                <td class="right num">{amount(account.per_million)}</td>
                <td class="right num">{amount(account.floor_per_million)}</td>
                <td class={`right num ${isFarOver(account) ? "warn-text" : ""}`}>{times(account.over_floor)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="soft small">
        Requests paid their part; platform is probes, hedges and attempts that were lost; idle is time in service without work; reserve is time before it, or out of it. The least is the same work in full batches at the device's measured speed.
      </p>
    </section>
  );
}

function Requests({ told }: { told: Report }): JSX.Element {
  const head = GROUPS.find(([each]) => each === told.by)?.[1] ?? told.by;
  const hasMachines = told.total.accelerator_cost_micros > 0;
  const line = (each: UsageLine, isTotal = false): JSX.Element => (
    <tr key={isTotal ? "total" : each.name} class={isTotal ? "total" : undefined}>
      <th scope="row">{isTotal ? "All" : each.name || NONE[told.by] || "–"}</th>
      <td class="right num">{format.count(each.requests)}</td>
      <td class="right num">{each.failed ? format.count(each.failed) : "0"}</td>
      <td class="right num" title={`${each.cached_tokens} of them cached`}>{format.count(each.prompt_tokens)}</td>
      <td class="right num">{format.count(each.completion_tokens)}</td>
      {told.is_priced && <td class="right num">{format.money(each.cost_micros)}</td>}
      {hasMachines && <td class="right num">{format.money(each.accelerator_cost_micros)}</td>}
      {hasMachines && <td class="right num">{each.per_million_micros === null ? "–" : format.money(each.per_million_micros)}</td>}
    </tr>
  );
  return (
    <section class="card">
      <h2>The cost of requests</h2>
      {told.usage.length === 0 ? (
        <Empty title="No requests">Nothing has ended since {told.since}.</Empty>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="The requests">
          <table>
            <thead>
              <tr>
                <th scope="col">{head}</th>
                <th scope="col" class="right">Requests</th>
                <th scope="col" class="right">Failed</th>
                <th scope="col" class="right">Prompt tokens</th>
                <th scope="col" class="right">Output tokens</th>
                {told.is_priced && <th scope="col" class="right">Price ({told.currency})</th>}
                {hasMachines && <th scope="col" class="right">Machines ({told.currency})</th>}
                {hasMachines && <th scope="col" class="right">1M tokens</th>}
              </tr>
            </thead>
            <tbody>
              {told.usage.map((each) => line(each))}
              {told.num_lines > 1 && line(told.total, true)}
            </tbody>
          </table>
        </div>
      )}
      {told.num_lines > told.usage.length && <p class="soft small">These are the dearest {told.usage.length} of {format.count(told.num_lines)}.</p>}
      {!told.is_priced && (
        <p class="soft small">
          There is no price list (<code>prices.models</code>), so requests cost their senders nothing.
        </p>
      )}
    </section>
  );
}

export function Costs(): JSX.Element {
  const by = useSignal<Group>("tenant");
  const days = useSignal("7");
  const { told, problem, again } = usePolled<Report>(`/admin/costs?by=${by.value}&days=${days.value}`, EVERY_MS);
  const found = told.value;
  return (
    <Page
      title="Costs"
      note={found ? `Since ${found.since}, UTC days` : undefined}
      actions={
        <>
          <Segmented label="By" value={by.value} options={GROUPS} onChange={(value) => (by.value = value)} />
          <Segmented label="Days" value={days.value} options={SPANS} onChange={(value) => (days.value = value)} />
        </>
      }
    >
      {problem.value && <Problem message={problem.value} again={again} />}
      {!found && !problem.value && <Skeleton lines={4} />}
      {found && (
        <>
          <Requests told={found} />
          <Machines told={found} />
        </>
      )}
    </Page>
  );
}
