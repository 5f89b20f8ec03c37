// Requests to this server, with the key that is kept in this page's memory and nowhere else.
import { signal } from "@preact/signals";

export const key = signal("");

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

function headers(own: string, body: boolean): HeadersInit {
  const found: Record<string, string> = {};
  if (own) found["Authorization"] = `Bearer ${own}`;
  if (body) found["Content-Type"] = "application/json";
  return found;
}

export interface Ask {
  method?: string;
  body?: unknown;
  key?: string;
  signal?: AbortSignal;
}

/** Ask for a path; an answer that is an error is thrown as the server says it. */
export async function ask(path: string, { method, body, key: own, signal: abort }: Ask = {}): Promise<Response> {
  let answer: Response;
  try {
    answer = await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: headers(own ?? key.value, body !== undefined),
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: abort,
      cache: "no-store",
    });
  } catch (error) {
    if (abort?.aborted) throw error;
    throw new ApiError(0, "unreachable", "The server does not answer.");
  }
  if (answer.ok) return answer;
  let message = `The server answered ${answer.status}.`;
  let code = "";
  try {
    const told = ((await answer.json()) as { error?: { message?: string; code?: string } }).error;
    message = told?.message ?? message;
    code = told?.code ?? "";
  } catch {
    // A body that is not JSON says nothing more than the status.
  }
  throw new ApiError(answer.status, code, message);
}

export async function get<T>(path: string, options: Ask = {}): Promise<T> {
  return (await (await ask(path, options)).json()) as T;
}

export interface Event {
  name: string;
  data: string;
}

/** Server-sent events of an answer (WHATWG HTML, 9.2), as they come. EventSource could not send a key. */
export async function* events(answer: Response): AsyncGenerator<Event> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        let name = "message";
        const data: string[] = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) yield { name, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
