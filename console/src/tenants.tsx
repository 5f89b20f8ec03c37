// Who may use how much, who uses how much, and their keys.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { ApiError, get } from "./api";
import * as format from "./format";
import { usePolled } from "./poll";
import { own, role } from "./store";
import { Copy, Empty, Facts, Page, Problem, Skeleton } from "./ui";

interface TenantLine {
  id: string;
  tier: string;
  band: string;
  weight: number;
  live: number;
  concurrent_max: number;
  requests_per_minute: number;
  tokens_per_minute: number;
  spent_day_micros: number;
  budget_day_micros: number;
  spent_month_micros: number;
  budget_month_micros: number;
  models: string[];
}

interface KeyLine {
  prefix: string;
  tenant: string;
  tier: string;
  label: string;
  state: string;
  created_s: number;
  expires_s: number;
  admin: boolean;
  scrape: boolean;
}

const EVERY_MS = 5000;
/** In one answer of the server. */
const LISTED = 500;
const limit = (value: number): string => (value ? format.count(value) : "no limit");

/** How much of a limit is used: a number, and a bar where there is a limit. */
function Use({ used, of, show = format.count, label }: { used: number; of: number; show?: (value: number) => string; label: string }): JSX.Element {
  const share = of ? used / of : 0;
  return (
    <span class="use">
      <span class="num">
        {show(used)} <span class="soft">{of ? `of ${show(of)}` : ""}</span>
      </span>
      {of > 0 && (
        <span class={`meter ${share >= 1 ? "bad" : share > 0.8 ? "warn" : ""}`} role="meter" aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(Math.min(1, share) * 100)}>
          <i style={{ transform: `scaleX(${Math.min(1, share).toFixed(3)})` }} />
        </span>
      )}
    </span>
  );
}

function Table({ list }: { list: TenantLine[] }): JSX.Element {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="The tenants">
      <table>
        <thead>
          <tr>
            <th scope="col">Tenant</th>
            <th scope="col">Tier, band</th>
            <th scope="col">Running now</th>
            <th scope="col" class="right">Requests/min</th>
            <th scope="col" class="right">Tokens/min</th>
            <th scope="col">Spent today</th>
            <th scope="col">Spent this month</th>
            <th scope="col">Models</th>
          </tr>
        </thead>
        <tbody>
          {list.map((each) => (
            <tr key={each.id}>
              <th scope="row">{each.id || "–"}</th>
              <td>{[each.tier, each.band].filter(Boolean).join(", ")}</td>
              <td>
                <Use used={each.live} of={each.concurrent_max} label={`Requests of ${each.id}`} />
              </td>
              <td class="right num">{limit(each.requests_per_minute)}</td>
              <td class="right num">{limit(each.tokens_per_minute)}</td>
              <td>
                <Use used={each.spent_day_micros} of={each.budget_day_micros} show={format.money} label={`Day budget of ${each.id}`} />
              </td>
              <td>
                <Use used={each.spent_month_micros} of={each.budget_month_micros} show={format.money} label={`Month budget of ${each.id}`} />
              </td>
              <td>{each.models.length ? each.models.join(", ") : "all"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Which part of a long list is shown. */
function Pager({ offset, shown, total, go, what }: { offset: number; shown: number; total: number; go: (offset: number) => void; what: string }): JSX.Element | null {
  if (total <= shown && !offset) return null;
  return (
    <nav class="row" aria-label={`Pages of ${what}`}>
      <button type="button" disabled={!offset} onClick={() => go(Math.max(0, offset - LISTED))}>
        Before
      </button>
      <button type="button" disabled={offset + shown >= total} onClick={() => go(offset + LISTED)}>
        Next
      </button>
      <span class="soft small num pager">
        {shown ? `${offset + 1} to ${offset + shown}` : "None"} of {total} {what}
      </span>
    </nav>
  );
}

/** A new key, shown this once. */
function Fresh({ made, onDone }: { made: string; onDone: () => void }): JSX.Element {
  return (
    <div class="fresh-key" role="status">
      <span>The new key, shown only now:</span> <code>{made}</code>
      <Copy text={made} />
      <button type="button" onClick={onDone}>
        Done
      </button>
    </div>
  );
}

function NewKey({ tenants, busy, send }: { tenants: TenantLine[]; busy: boolean; send: (path: string, body: unknown) => void }): JSX.Element {
  const tenant = useSignal("");
  const label = useSignal("");
  const days = useSignal("");
  return (
    <form
      class="inline-form"
      onSubmit={(event) => {
        event.preventDefault();
        send("/admin/keys", { tenant: tenant.value.trim(), label: label.value.trim(), expires_days: Number(days.value) || 0 });
      }}
    >
      <label>
        Tenant
        <input list="tenants" required value={tenant.value} onInput={(event) => (tenant.value = event.currentTarget.value)} />
      </label>
      <datalist id="tenants">
        {tenants.map((each) => (
          <option key={each.id} value={each.id} />
        ))}
      </datalist>
      <label>
        Label
        <input value={label.value} maxLength={200} onInput={(event) => (label.value = event.currentTarget.value)} />
      </label>
      <label>
        Ends after days
        <input type="number" min="0" placeholder="never" value={days.value} onInput={(event) => (days.value = event.currentTarget.value)} />
      </label>
      <button type="submit" class="primary" disabled={busy || !tenant.value.trim()}>
        Make a key
      </button>
    </form>
  );
}

function Keys({ tenants }: { tenants: TenantLine[] }): JSX.Element {
  const told = useSignal<{ writable: boolean; keys: KeyLine[]; total: number } | null>(null);
  const problem = useSignal("");
  const made = useSignal("");
  const busy = useSignal(false);
  const asked = useSignal("");
  const offset = useSignal(0);
  const dialog = useRef<HTMLDialogElement>(null);
  const fail = (error: unknown): void => void (problem.value = error instanceof ApiError ? error.message : String(error));
  const look = (): Promise<void> => get<NonNullable<typeof told.value>>(`/admin/keys?offset=${offset.value}`).then((found) => void (told.value = found), fail);
  useEffect(() => void look(), [offset.value]);
  const send = async (path: string, body: unknown): Promise<void> => {
    busy.value = true;
    problem.value = "";
    try {
      const answer = await get<{ key?: string }>(path, { method: "POST", body });
      if (answer.key) made.value = answer.key;
      await look();
    } catch (error) {
      fail(error);
    }
    busy.value = false;
  };
  const found = told.value;
  return (
    <section class="card">
      <h2>Keys</h2>
      {problem.value && <Problem message={problem.value} />}
      {made.value && <Fresh made={made.value} onDone={() => (made.value = "")} />}
      {!found && !problem.value && <Skeleton lines={2} />}
      {found && !found.writable && (
        <p class="soft">
          This server's keys are in its configuration, where it cannot change them. With <code>auth.keys_file</code> they are made, rotated and revoked here, or by <code>penstock keys</code>.
        </p>
      )}
      {found?.writable && <NewKey tenants={tenants} busy={busy.value} send={(path, body) => void send(path, body)} />}
      {found && found.keys.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="The keys">
          <table>
            <thead>
              <tr>
                <th scope="col">Key</th>
                <th scope="col">Tenant</th>
                <th scope="col">Label</th>
                <th scope="col">State</th>
                <th scope="col">Made</th>
                <th scope="col">Ends</th>
                <th scope="col">
                  <span class="hidden">Orders</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {found.keys.map((each) => (
                <tr key={each.prefix}>
                  <th scope="row" class="mono">
                    {each.prefix}
                  </th>
                  <td>
                    {each.tenant}
                    {each.admin && <span class="soft"> · admin</span>}
                    {each.scrape && <span class="soft"> · scraper</span>}
                  </td>
                  <td>{each.label}</td>
                  <td>
                    <span class={`state ${each.state === "active" ? "good" : "off"}`}>
                      <i aria-hidden="true" />
                      {each.state}
                    </span>
                  </td>
                  <td class="num soft">{format.date(each.created_s * 1000)}</td>
                  <td class="num soft">{each.expires_s ? format.date(each.expires_s * 1000) : "never"}</td>
                  <td class="right">
                    {each.state === "active" && (
                      <>
                        {!each.admin && !each.scrape && (
                          <button type="button" class="quiet" disabled={busy.value} onClick={() => void send(`/admin/keys/${each.prefix}/rotate`, { grace_days: 1 })}>
                            Rotate
                          </button>
                        )}
                        <button
                          type="button"
                          class="quiet"
                          disabled={busy.value}
                          onClick={() => {
                            asked.value = each.prefix;
                            dialog.current?.showModal();
                          }}
                        >
                          Revoke…
                        </button>
                      </>
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {found && <Pager what="keys" offset={offset.value} shown={found.keys.length} total={found.total} go={(at) => (offset.value = at)} />}
      <dialog ref={dialog} aria-labelledby="revoke-title">
        <h2 id="revoke-title">Revoke {asked.value}?</h2>
        <p>It is refused within seconds, and for good. A rotated key works for another day.</p>
        <form method="dialog" class="row">
          <button type="submit" class="danger" onClick={() => void send(`/admin/keys/${asked.value}/revoke`, {})}>
            Revoke
          </button>
          <button type="submit" class="quiet">
            Cancel
          </button>
        </form>
      </dialog>
    </section>
  );
}

function Own(): JSX.Element {
  const told = own.value;
  return (
    <Page title="Your use">
      {!told ? (
        <Skeleton />
      ) : (
        <div class="card narrow">
          <Facts
            rows={[
              ["Tenant", told.tenant || "–"],
              ["Tier", told.tier || "–"],
              ["Running now", <span class="num">{format.plural(told.streams, "request")}</span>],
              ["Spent today", <span class="num">{format.money(told.spent_day_micros)}</span>],
              ["This month", <span class="num">{format.money(told.spent_month_micros)}</span>],
            ]}
          />
          <p class="soft small">
            Limits stand in the headers of every answer (<code>x-ratelimit-…</code>) and in <code>GET /v1/models</code>.
          </p>
        </div>
      )}
    </Page>
  );
}

export function Tenants(): JSX.Element {
  const isAdmin = role.value === "admin";
  const offset = useSignal(0);
  const { told, problem, again } = usePolled<{ tenants: TenantLine[]; total: number }>(isAdmin ? `/admin/tenants?offset=${offset.value}` : "", EVERY_MS);
  if (!isAdmin) return <Own />;
  const found = told.value;
  return (
    <Page title="Tenants" note={found ? format.plural(found.total, "tenant") : undefined}>
      {problem.value && <Problem message={problem.value} again={again} />}
      {!found && !problem.value && <Skeleton />}
      {found && (
        <>
          {found.total === 0 ? (
            <Empty title="No tenant is listed">Keys of the configuration's auth.keys are each a tenant without limits. Tenants come with the section tenants, or with a key in auth.keys_file.</Empty>
          ) : (
            <Table list={found.tenants} />
          )}
          <Pager what="tenants" offset={offset.value} shown={found.tenants.length} total={found.total} go={(at) => (offset.value = at)} />
          <Keys tenants={found.tenants} />
        </>
      )}
    </Page>
  );
}
