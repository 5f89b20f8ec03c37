// The frame: where to go, who looks, and how fresh all of it is.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { Alerts } from "./alerts";
import { key } from "./api";
import { Capacity } from "./capacity";
import { Costs } from "./costs";
import { Fleet } from "./fleet";
import { duration } from "./format";
import { Playground } from "./playground";
import { Reports } from "./reports";
import { Requests } from "./requests";
import { Rollouts } from "./rollouts";
import { href, place } from "./route";
import { type Role, hello, link, linkProblem, role, server, signIn, signOut } from "./store";
import { Tenants } from "./tenants";
import { Traffic } from "./traffic";
import { Icon, Skeleton } from "./ui";

const PAGES: { id: string; name: string; page: () => JSX.Element; for: Role[] }[] = [
  { id: "fleet", name: "Fleet", page: Fleet, for: ["admin", "viewer", "tenant"] },
  { id: "traffic", name: "Traffic", page: Traffic, for: ["admin"] },
  { id: "requests", name: "Requests", page: Requests, for: ["admin", "tenant"] },
  { id: "playground", name: "Playground", page: Playground, for: ["admin", "viewer", "tenant"] },
  { id: "tenants", name: "Tenants", page: Tenants, for: ["admin", "tenant"] },
  { id: "capacity", name: "Capacity", page: Capacity, for: ["admin"] },
  { id: "rollouts", name: "Rollouts", page: Rollouts, for: ["admin"] },
  { id: "costs", name: "Costs", page: Costs, for: ["admin"] },
  { id: "alerts", name: "Alerts", page: Alerts, for: ["admin"] },
  { id: "reports", name: "Reports", page: Reports, for: ["admin", "viewer", "tenant"] },
];

/** On a phone there is place for so many; the others are behind "More". */
const PHONE_PAGES = ["fleet", "traffic", "requests", "playground", "alerts"];

const LINKS = { connecting: "Connecting", live: "Live", lost: "Reconnecting", denied: "Signed out" };

function Brand(): JSX.Element {
  return (
    <a class="brand" href={href("fleet")}>
      <svg width="26" height="26" viewBox="0 0 32 32" aria-hidden="true">
        <rect width="32" height="32" rx="8" />
        <path d="M9 5v9c0 5 4 9 9 9h5" />
      </svg>
      <span>Penstock</span>
    </a>
  );
}

function Session(): JSX.Element {
  const told = server.value;
  const who = hello.value;
  const names: Record<Role, string> = { admin: "Admin", viewer: "Viewer", tenant: who?.tenant || "Tenant", "": "" };
  return (
    <div class="session">
      <p class={`link ${link.value}`} role="status">
        <i aria-hidden="true" />
        {LINKS[link.value]}
        {link.value === "live" && role.value && <span class="soft">{names[role.value]}</span>}
      </p>
      {told && (
        <p class="soft small num wide-only">
          {told.version} · up {duration(told.uptime_s)}
          {told.processes > 1 && <> · {told.processes} processes</>}
        </p>
      )}
      {key.value ? (
        <button type="button" class="quiet" onClick={signOut}>
          Sign out
        </button>
      ) : (
        role.value === "viewer" && <SignInDialog />
      )}
    </div>
  );
}

function KeyForm({ autoFocus }: { autoFocus?: boolean }): JSX.Element {
  const given = useSignal("");
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => {
    if (autoFocus) field.current?.focus();
  }, []);
  return (
    <form
      class="key-form"
      onSubmit={(event) => {
        event.preventDefault();
        if (given.value.trim()) signIn(given.value);
      }}
    >
      <label for="key">API key</label>
      <div class="row">
        <input
          id="key"
          ref={field}
          type="password"
          autocomplete="off"
          spellcheck={false}
          placeholder="sk-…"
          value={given.value}
          onInput={(event) => (given.value = event.currentTarget.value)}
        />
        <button type="submit" class="primary" disabled={!given.value.trim()}>
          Sign in
        </button>
      </div>
      <p class="soft small">The key stays in this page's memory: reload the page, and it is gone.</p>
    </form>
  );
}

function SignInDialog(): JSX.Element {
  const dialog = useRef<HTMLDialogElement>(null);
  return (
    <>
      <button type="button" onClick={() => dialog.current?.showModal()}>
        Sign in
      </button>
      <dialog ref={dialog} aria-labelledby="sign-in-title">
        <h2 id="sign-in-title">Sign in as an admin</h2>
        <p>Traffic, requests, and draining a worker take an admin key.</p>
        <KeyForm />
        <form method="dialog">
          <button type="submit" class="quiet">
            Cancel
          </button>
        </form>
      </dialog>
    </>
  );
}

function Denied(): JSX.Element {
  const had = key.value !== "";
  return (
    <main class="gate" id="main">
      <div class="card gate-card">
        <Brand />
        <h1>{had ? "This key was not accepted" : "Sign in"}</h1>
        <p>
          {had
            ? linkProblem.value
            : "An admin key shows the whole server; a tenant's key shows that tenant's own part."}
        </p>
        <KeyForm autoFocus />
        <p class="soft small">
          New keys: <code>penstock keys create --tenant NAME</code>, with <code>--admin</code> for the whole server.
        </p>
      </div>
    </main>
  );
}

export function Shell(): JSX.Element {
  const first = useRef(true);
  const open = useSignal(false);
  const { page } = place.value;
  useEffect(() => {
    open.value = false;
    if (first.current) first.current = false;
    else document.getElementById("main")?.focus({ preventScroll: true });
    scrollTo(0, 0);
  }, [page]);
  if (link.value === "denied") return <Denied />;
  const mine = PAGES.filter((each) => !role.value || each.for.includes(role.value));
  const shown = mine.find((each) => each.id === page) ?? mine[0]!;
  const Shown = shown.page;
  const isMore = (id: string): boolean => mine.length > PHONE_PAGES.length + 1 && !PHONE_PAGES.includes(id);
  return (
    <div class="frame">
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>
        Skip to the content
      </a>
      <div class="rail">
        <Brand />
        <nav aria-label="Console" class={open.value ? "open" : undefined}>
          {mine.map((each) => (
            <a key={each.id} class={isMore(each.id) ? "more" : undefined} href={href(each.id)} aria-current={each === shown ? "page" : undefined}>
              <Icon name={each.id} />
              <span>{each.name}</span>
            </a>
          ))}
          {mine.some((each) => isMore(each.id)) && (
            <button type="button" class={isMore(shown.id) ? "within" : undefined} aria-expanded={open.value} onClick={() => (open.value = !open.value)}>
              <Icon name="more" />
              <span>{isMore(shown.id) && !open.value ? shown.name : "More"}</span>
            </button>
          )}
        </nav>
        <Session />
      </div>
      <div class="content">
        {link.value === "lost" && (
          <p class="banner" role="alert">
            <Icon name="warn" /> {linkProblem.value} Trying again; the numbers below are the last known.
          </p>
        )}
        {server.value?.draining && (
          <p class="banner" role="status">
            <Icon name="warn" /> This server is draining: it takes no new requests.
          </p>
        )}
        {role.value ? <Shown /> : <main class="page" id="main"><Skeleton lines={6} /></main>}
      </div>
    </div>
  );
}
