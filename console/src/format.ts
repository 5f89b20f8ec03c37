// Numbers and times as people read them. All of them are set in tabular figures.

const SI = ["", "k", "M", "G", "T"];

/** 0, 7, 42.5, 980, 1.24k, 38.1k, 2.05M: three significant figures at most. */
export function count(value: number): string {
  if (!Number.isFinite(value)) return "–";
  let unit = 0;
  let size = Math.abs(value);
  while (size >= 999.5 && unit < SI.length - 1) {
    size /= 1000;
    unit += 1;
  }
  const digits = unit === 0 && Number.isInteger(value) ? 0 : size >= 99.95 ? 0 : size >= 9.995 ? 1 : size === 0 ? 0 : size < 0.0995 ? 3 : 2;
  return (value < 0 ? "−" : "") + size.toFixed(digits) + SI[unit];
}

/** Milliseconds: 0.42 ms, 38 ms, 1.24 s, 2 m 05 s. */
export function ms(value: number): string {
  if (!Number.isFinite(value) || value < 0) return "–";
  if (value === 0) return "0 ms";
  if (value < 10) return `${value.toFixed(value < 1 ? 2 : 1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  if (value < 60_000) return `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
  const seconds = Math.round(value / 1000);
  return `${Math.floor(seconds / 60)} m ${String(seconds % 60).padStart(2, "0")} s`;
}

export function percent(share: number): string {
  if (!Number.isFinite(share)) return "–";
  const value = share * 100;
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
}

export function duration(seconds: number): string {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d ${Math.floor((seconds % 86_400) / 3600)} h`;
}

const clockFormat = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const minuteFormat = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const dateFormat = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

export const clock = (at: number): string => clockFormat.format(at);
export const minute = (at: number): string => minuteFormat.format(at);
export const date = (at: number): string => dateFormat.format(at);

/** Millionths of the price list's currency. */
export function money(micros: number): string {
  const value = micros / 1e6;
  if (value === 0) return "0";
  return value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value < 0.01 ? 6 : value < 1 ? 4 : 2 });
}

export const plural = (n: number, one: string, many = `${one}s`): string => `${count(n)} ${n === 1 ? one : many}`;
