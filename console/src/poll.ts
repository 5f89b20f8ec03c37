// What the server is asked for again and again, while its page is open.
import { type Signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ApiError, get } from "./api";

export interface Polled<T> {
  told: Signal<T | null>;
  problem: Signal<string>;
  /** The problem's code: "unknown_path" of a server that has no such thing. */
  code: Signal<string>;
  /** Ask at once. */
  again: () => void;
}

/** What `path` answers, every so many milliseconds (a page that nobody sees asks less often); an empty path is not asked. */
export function usePolled<T>(path: string, everyMs: number): Polled<T> {
  const told = useSignal<T | null>(null);
  const problem = useSignal("");
  const code = useSignal("");
  const again = useSignal(0);
  useEffect(() => {
    if (!path) return;
    const stop = new AbortController();
    let timer = 0;
    const look = async (): Promise<void> => {
      try {
        told.value = await get<T>(path, { signal: stop.signal });
        problem.value = "";
      } catch (error) {
        if (stop.signal.aborted) return;
        problem.value = error instanceof ApiError ? error.message : String(error);
        code.value = error instanceof ApiError ? error.code : "";
      }
      if (!stop.signal.aborted) timer = window.setTimeout(() => void look(), document.hidden ? everyMs * 4 : everyMs);
    };
    void look();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [path, everyMs, again.value]);
  return { told, problem, code, again: () => void (again.value += 1) };
}
