// Where the page is: `#/fleet/tiny-0` is the page "fleet" and what it shows of it.
import { signal } from "@preact/signals";

export interface Place {
  page: string;
  /** What follows the page's name, decoded. */
  rest: string;
}

function read(): Place {
  const [page = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return { page: page || "fleet", rest: rest.map(decodeURIComponent).join("/") };
}

export const place = signal<Place>(read());

addEventListener("hashchange", () => (place.value = read()));

export const href = (page: string, rest = ""): string => `#/${page}${rest ? `/${encodeURIComponent(rest)}` : ""}`;

export function go(page: string, rest = ""): void {
  location.hash = href(page, rest);
}
