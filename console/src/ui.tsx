// What several pages are made of.
import { useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";

const PATHS: Record<string, string> = {
  fleet: "M3 4h18v6H3zM3 14h18v6H3zM7 7h.01M7 17h.01M11 7h6M11 17h6",
  traffic: "M3 20h18M4 15l5-6 4 4 7-9",
  requests: "M4 6h16M4 12h10M4 18h13",
  playground: "M4 5h16v11H10l-5 4v-4H4z",
  tenants: "M9 11a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM2 21c0-4 3-7 7-7s7 3 7 7M17 4a4 4 0 0 1 0 7M22 21c0-3-1.5-5.5-4-6.5",
  rollouts: "M6 21V3M6 14c0-5 12-3 12-9M3 6l3-3 3 3M15 8l3-3 3 3",
  capacity: "M4 20v-4h4v4zM10 20V11h4v9zM16 20V5h4v15z",
  costs: "M12 3v18M17 7.5C17 5.5 14.8 5 12 5S7 6.3 7 8.3 9 11.5 12 12s5 1.5 5 3.7S14.8 19 12 19s-5-.9-5-2.9",
  alerts: "M12 3a6 6 0 0 1 6 6c0 6 2 7 2 8H4c0-1 2-2 2-8a6 6 0 0 1 6-6zM10 21h4",
  reports: "M5 3h10l4 4v14H5zM9 17v-4M12 17v-7M15 17v-2",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  close: "M5 5l14 14M19 5L5 19",
  back: "M15 4l-8 8 8 8",
  copy: "M8 8h12v12H8zM4 16V4h12",
  check: "M4 12l5 6L20 6",
  pause: "M8 5v14M16 5v14",
  play: "M7 4l13 8-13 8z",
  send: "M4 12l16-8-6 16-3-7z",
  stop: "M6 6h12v12H6z",
  plus: "M12 4v16M4 12h16",
  search: "M11 18a7 7 0 1 0 0-14 7 7 0 0 0 0 14zM21 21l-5-5",
  warn: "M12 3l10 18H2zM12 10v5M12 18h.01",
};

export function Icon({ name, size = 18 }: { name: string; size?: number }): JSX.Element {
  return (
    <svg class="icon" width={size} height={size} viewBox="0 0 24 24" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}

export function Page({ title, note, actions, children }: { title: string; note?: ComponentChildren; actions?: ComponentChildren; children: ComponentChildren }): JSX.Element {
  useEffect(() => {
    document.title = `${title} · Penstock`;
  }, [title]);
  return (
    <main class="page" id="main" tabIndex={-1}>
      <header class="page-head">
        <div class="page-title">
          <h1>{title}</h1>
          {note && <p class="soft">{note}</p>}
        </div>
        {actions && <div class="actions">{actions}</div>}
      </header>
      {children}
    </main>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }): JSX.Element {
  return (
    <div class="empty">
      <strong>{title}</strong>
      {children && <p>{children}</p>}
    </div>
  );
}

export function Problem({ message, again }: { message: string; again?: () => void }): JSX.Element {
  return (
    <div class="problem" role="alert">
      <Icon name="warn" />
      <p>{message}</p>
      {again && (
        <button type="button" onClick={again}>
          Try again
        </button>
      )}
    </div>
  );
}

export const Skeleton = ({ lines = 3 }: { lines?: number }): JSX.Element => (
  <div class="skeleton" role="status" aria-label="Loading">
    {Array.from({ length: lines }, (_, i) => (
      <i key={i} />
    ))}
  </div>
);

export function Segmented<T extends string>({ label, value, options, onChange }: { label: string; value: T; options: [T, string][]; onChange: (value: T) => void }): JSX.Element {
  return (
    <div class="segmented" role="group" aria-label={label}>
      {options.map(([each, text]) => (
        <button type="button" key={each} aria-pressed={each === value} onClick={() => onChange(each)}>
          {text}
        </button>
      ))}
    </div>
  );
}

export function Select({ label, value, options, onChange }: { label: string; value: string; options: [string, string][]; onChange: (value: string) => void }): JSX.Element {
  return (
    <label class="select">
      <span>{label}</span>
      <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {options.map(([each, text]) => (
          <option key={each} value={each}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

export function Copy({ text, label = "Copy" }: { text: string; label?: string }): JSX.Element {
  const done = useSignal(false);
  return (
    <button
      type="button"
      class="quiet"
      onClick={() => {
        void navigator.clipboard?.writeText(text).then(() => {
          done.value = true;
          setTimeout(() => (done.value = false), 1500);
        });
      }}
    >
      <Icon name={done.value ? "check" : "copy"} size={14} />
      {done.value ? "Copied" : label}
    </button>
  );
}

/** A panel beside the page, or over it on a phone. Escape closes it; focus goes in, and comes back. */
export function Drawer({ title, sub, onClose, children }: { title: string; sub?: ComponentChildren; onClose: () => void; children: ComponentChildren }): JSX.Element {
  const panel = useRef<HTMLElement>(null);
  useEffect(() => {
    const before = document.activeElement as HTMLElement | null;
    panel.current?.focus();
    return () => before?.focus?.();
  }, [title]);
  return (
    <aside
      class="drawer"
      ref={panel}
      tabIndex={-1}
      aria-label={title}
      onKeyDown={(event) => {
        if (event.key === "Escape") onClose();
      }}
    >
      <header>
        <div>
          <h2>{title}</h2>
          {sub && <p class="soft">{sub}</p>}
        </div>
        <button type="button" class="quiet square" aria-label="Close" onClick={onClose}>
          <Icon name="close" />
        </button>
      </header>
      <div class="drawer-body">{children}</div>
    </aside>
  );
}

const TONES: Record<string, string> = {
  ready: "good",
  starting: "info",
  loading: "info",
  warming: "info",
  asleep: "off",
  waking: "info",
  suspect: "warn",
  draining: "drain",
  gone: "off",
};

export const toneOf = (state: string): string => TONES[state] ?? "off";

export function State({ state, alone }: { state: string; alone?: boolean }): JSX.Element {
  return (
    <span class={`state ${alone ? "warn" : toneOf(state)}`}>
      <i aria-hidden="true" />
      {alone ? "left alone" : state}
    </span>
  );
}

export function Facts({ rows }: { rows: [string, ComponentChildren][] }): JSX.Element {
  return (
    <dl class="facts">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

const SPARK_POINTS = 30;

/** Means of values that follow one another: a hand's breadth of line has room for no more. */
function thinned(values: number[]): number[] {
  const each = Math.ceil(values.length / SPARK_POINTS);
  if (each < 2) return values;
  const found: number[] = [];
  for (let end = values.length; end > 0; end -= each) {
    const some = values.slice(Math.max(0, end - each), end);
    found.unshift(some.reduce((sum, value) => sum + value, 0) / some.length);
  }
  return found;
}

/** A line without axes: the shape of the last values. */
export function Spark({ values: all, max, area = true }: { values: number[]; max?: number; area?: boolean }): JSX.Element {
  const values = thinned(all.filter(Number.isFinite));
  const width = 100;
  const height = 28;
  const top = Math.max(max ?? 0, ...values, 1e-9);
  const last = Math.max(values.length - 1, 1);
  const points = values.map((value, i) => `${((i / last) * width).toFixed(1)} ${(height - 1.5 - (value / top) * (height - 4)).toFixed(1)}`);
  const line = points.length > 1 ? `M${points.join("L")}` : "";
  return (
    <svg class="spark" viewBox={`0 0 ${width} ${height}`} preserveAspectRatio="none" aria-hidden="true">
      {area && line && <path class="spark-area" d={`${line}L${width} ${height}L0 ${height}Z`} />}
      {line && <path class="spark-line" d={line} vector-effect="non-scaling-stroke" />}
    </svg>
  );
}
