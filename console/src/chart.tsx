// One time chart: lines, a stack of areas, or a stack of bars, over a shared time axis. SVG, so that it takes the
// page's colours and prints; a few hundred points at most, which the server sees to.
import { signal, useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";
import * as format from "./format";

export interface Line {
  name: string;
  /** One of the data colours of style.css. */
  color: string;
  values: (number | null)[];
  /** How it is drawn; areas and bars stand on one another. */
  kind?: "line" | "area" | "bar";
  dashed?: boolean;
}

interface Props {
  title: string;
  /** Said under the title: what is measured, in which unit. */
  hint?: string;
  times: number[];
  stepMs: number;
  lines: Line[];
  unit: (value: number) => string;
  promise?: { value: number; label: string };
  height?: number;
  /** The number beside the title. */
  headline?: string;
  empty?: string;
  min?: number;
  /** What the times are; the wall clock if nothing is said. */
  axis?: Axis;
}

export interface Axis {
  ticks: (from: number, to: number, width: number) => number[];
  tick: (at: number) => string;
  /** One moment, where a column is so wide. */
  read: (at: number, stepMs: number) => string;
}

const LEFT = 52;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;

/** The moment under the pointer, on every chart of the page at once. */
const cursor = signal<number | null>(null);

export function niceTicks(top: number, about = 4): number[] {
  const raw = top / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 2.5, 5, 10].find((each) => each * power >= raw - 1e-12) ?? 10);
  const found: number[] = [];
  for (let value = 0; value <= top + step * 0.999; value += step) found.push(value);
  return found;
}

function timeTicks(from: number, to: number, width: number): number[] {
  const minutes = [1, 2, 3, 5, 10, 15, 30, 60, 120, 180, 240, 360, 720];
  const wanted = (to - from) / Math.max(2, Math.floor(width / 90)) / 60_000;
  const step = (minutes.find((each) => each >= wanted) ?? 720) * 60_000;
  const shift = new Date(from).getTimezoneOffset() * 60_000;
  const found: number[] = [];
  for (let at = Math.ceil((from - shift) / step) * step + shift; at <= to; at += step) found.push(at);
  return found;
}

export const CLOCK: Axis = { ticks: timeTicks, tick: format.minute, read: (at, stepMs) => (stepMs >= 60_000 ? format.minute(at) : format.clock(at)) };

const seconds = (at: number): string => `${Number((at / 1000).toPrecision(6))} s`;
const within = (from: number, to: number) => (each: number): boolean => each >= from && each <= to;

/** Seconds since the start of something. */
export const SECONDS: Axis = {
  ticks: (from, to, width) => niceTicks(to, Math.max(2, Math.floor(width / 90))).filter(within(from, to)),
  tick: seconds,
  read: seconds,
};

/** Thousandths of the decimal logarithm of milliseconds. */
export const LOG_MS: Axis = {
  ticks: (from, to) => Array.from({ length: 12 }, (_, i) => (i - 3) * 1000).filter(within(from, to)),
  tick: (at) => format.ms(10 ** (at / 1000)),
  read: (at) => format.ms(10 ** (at / 1000)),
};

function stacked(lines: Line[], length: number): Map<Line, { low: number[]; high: (number | null)[] }> {
  const found = new Map<Line, { low: number[]; high: (number | null)[] }>();
  const base = new Array<number>(length).fill(0);
  for (const line of lines) {
    if (line.kind !== "area" && line.kind !== "bar") continue;
    const low = base.slice();
    const high = line.values.map((value, i) => (value === null ? null : (base[i]! += value)));
    found.set(line, { low, high });
  }
  return found;
}

/** The parts of a line between its gaps. */
function runs(values: (number | null)[]): [number, number][] {
  const found: [number, number][] = [];
  let start = -1;
  for (let i = 0; i <= values.length; i++) {
    const there = i < values.length && values[i] !== null && Number.isFinite(values[i]!);
    if (there && start < 0) start = i;
    if (!there && start >= 0) {
      found.push([start, i - 1]);
      start = -1;
    }
  }
  return found;
}

export function Chart(props: Props): JSX.Element {
  const { title, hint, times, stepMs, lines, unit, promise, height = 168, headline, empty = "Nothing was measured in this time.", axis = CLOCK } = props;
  const box = useRef<HTMLDivElement>(null);
  const width = useSignal(0);
  const id = useId();
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => (width.value = Math.round(entry!.contentRect.width)));
    watch.observe(box.current!);
    return () => watch.disconnect();
  }, []);

  const stack = stacked(lines, times.length);
  let top = props.min ?? 0;
  let some = false;
  for (const line of lines) {
    for (const value of stack.get(line)?.high ?? line.values) {
      if (value === null || !Number.isFinite(value)) continue;
      some = true;
      if (value > top) top = value;
    }
  }
  // A promise is drawn where the values are near it, and does not make all else flat.
  if (promise && promise.value < top * 2.5) top = Math.max(top, promise.value * 1.05);
  const ticks = niceTicks(top || 1);
  const most = ticks[ticks.length - 1]!;
  const from = times[0] ?? 0;
  const to = (times[times.length - 1] ?? 0) + stepMs;
  const innerWidth = Math.max(10, width.value - LEFT - RIGHT);
  const innerHeight = height - TOP - BOTTOM;
  const x = (at: number): number => LEFT + ((at - from) / Math.max(1, to - from)) * innerWidth;
  const y = (value: number): number => TOP + innerHeight - (value / most) * innerHeight;
  const middle = (i: number): number => x(times[i]! + stepMs / 2);

  const path = (line: Line): string => {
    const { low, high } = stack.get(line) ?? { low: null, high: line.values };
    let found = "";
    for (const [first, last] of runs(high)) {
      if (line.kind === "bar") {
        for (let i = first; i <= last; i++) {
          if (high[i]! <= low![i]!) continue;
          const w = Math.max(1, (innerWidth / Math.max(1, times.length)) * 0.78);
          const left = middle(i) - w / 2;
          found += `M${left.toFixed(1)} ${y(low![i]!).toFixed(1)}V${y(high[i]!).toFixed(1)}h${w.toFixed(1)}V${y(low![i]!).toFixed(1)}Z`;
        }
        continue;
      }
      const points: string[] = [];
      for (let i = first; i <= last; i++) points.push(`${middle(i).toFixed(1)} ${y(high[i]!).toFixed(1)}`);
      if (line.kind === "area") {
        for (let i = last; i >= first; i--) points.push(`${middle(i).toFixed(1)} ${y(low![i]!).toFixed(1)}`);
        found += `M${points.join("L")}Z`;
      } else found += points.length > 1 ? `M${points.join("L")}` : `M${points[0]}h.1`;
    }
    return found;
  };

  const at = cursor.value;
  const picked = at === null || at < from || at >= to ? -1 : Math.min(times.length - 1, Math.floor((at - from) / stepMs));
  const move = (event: PointerEvent): void => {
    const inside = event.clientX - box.current!.getBoundingClientRect().left - LEFT;
    cursor.value = inside < 0 || inside > innerWidth ? null : from + (inside / innerWidth) * (to - from);
  };
  const step = (event: KeyboardEvent): void => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") cursor.value = null;
    if (by === undefined || !times.length) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(times.length - 1, (picked < 0 ? times.length - 1 : picked) + by));
    cursor.value = times[next]! + stepMs / 2;
  };
  const readout =
    picked < 0
      ? ""
      : `${axis.read(times[picked]!, stepMs)}: ` +
        lines.map((line) => `${line.name} ${line.values[picked] == null ? "none" : unit(line.values[picked]!)}`).join(", ");

  return (
    <figure class="chart" aria-labelledby={`${id}-t`}>
      <figcaption id={`${id}-t`}>
        <span class="chart-title">{title}</span>
        {headline && <b class="num">{headline}</b>}
        {hint && <span class="soft">{hint}</span>}
      </figcaption>
      <ul class="legend">
        {lines.map((line) => (
          <li key={line.name}>
            <i class={`c-${line.color} ${line.kind === "area" || line.kind === "bar" ? "solid" : ""} ${line.dashed ? "dashed" : ""}`} />
            {line.name}
            {picked >= 0 && <b class="num">{line.values[picked] == null ? "–" : unit(line.values[picked]!)}</b>}
          </li>
        ))}
        {promise && (
          <li>
            <i class="c-promise dashed" />
            {promise.label}
          </li>
        )}
        {picked >= 0 && <li class="at num">{axis.read(times[picked]!, stepMs)}</li>}
      </ul>
      <div
        class="plot"
        ref={box}
        tabIndex={0}
        role="img"
        aria-label={readout || `${title}${headline ? `, ${headline}` : ""}. Arrow keys read single values.`}
        onPointerMove={move}
        onPointerLeave={() => (cursor.value = null)}
        onKeyDown={step}
        onBlur={() => (cursor.value = null)}
      >
        {!some && <p class="plot-empty">{empty}</p>}
        {width.value > 0 && (
          <svg width={width.value} height={height} aria-hidden="true">
            {ticks.map((tick) => (
              <g key={tick}>
                <line class="grid" x1={LEFT} x2={width.value - RIGHT} y1={y(tick)} y2={y(tick)} />
                {some && (
                  <text class="tick" x={LEFT - 7} y={y(tick) + 3.5} text-anchor="end">
                    {unit(tick).replace(/\.0+(?!\d)/, "")}
                  </text>
                )}
              </g>
            ))}
            {times.length > 1 &&
              axis.ticks(from, to, innerWidth).map((tick) => (
                <text key={tick} class="tick" x={x(tick)} y={height - 4} text-anchor="middle">
                  {axis.tick(tick)}
                </text>
              ))}
            {some && lines.map((line) => <path key={line.name} class={`${line.kind ?? "line"} c-${line.color} ${line.dashed ? "dashed" : ""}`} d={path(line)} />)}
            {some && promise && promise.value <= most && <line class="promise" x1={LEFT} x2={width.value - RIGHT} y1={y(promise.value)} y2={y(promise.value)} />}
            {picked >= 0 && <line class="cursor" x1={middle(picked)} x2={middle(picked)} y1={TOP} y2={TOP + innerHeight} />}
          </svg>
        )}
      </div>
    </figure>
  );
}
