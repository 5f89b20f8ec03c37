// The runbook's section about one alert, beside the alerts: docs/runbook.md, which the server hands out as it is.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { ApiError, ask } from "./api";
import { href } from "./route";
import { Drawer, Problem, Skeleton } from "./ui";

/** Its sections by name: what stands between two headings. */
export function sections(text: string): Map<string, string> {
  const found = new Map<string, string>();
  for (const part of text.split(/^## /m).slice(1)) {
    const [name = "", ...lines] = part.split("\n");
    found.set(name.trim(), lines.join("\n").trim());
  }
  return found;
}

/** Code, names of alerts in it as links to theirs, and bold text; a link to another page is its words. */
function inline(text: string, known: Map<string, string>): (JSX.Element | string)[] {
  return text.split(/(`[^`]+`|\*\*[^*]+\*\*|\[[^\]]+\]\([^)]+\))/).map((part, i) => {
    if (part.startsWith("`")) {
      const code = part.slice(1, -1);
      return known.has(code) ? <a key={i} href={href("alerts", code)}><code>{code}</code></a> : <code key={i}>{code}</code>;
    }
    if (part.startsWith("**")) return <b key={i}>{part.slice(2, -2)}</b>;
    if (part.startsWith("[")) return part.slice(1, part.indexOf("]")).replaceAll("`", "");
    return part;
  });
}

/** Paragraphs and numbered lists; a line that goes on is one with those before it. */
function Text({ text, known }: { text: string; known: Map<string, string> }): JSX.Element {
  return (
    <>
      {text.split(/\n\s*\n/).map((block, i) => {
        const items = block.split(/^\d+\. /m).map((each) => each.replace(/\s*\n\s*/g, " ").trim());
        if (items.length === 1) return <p key={i}>{inline(items[0]!, known)}</p>;
        return (
          <ol key={i}>
            {items.slice(1).map((each, n) => (
              <li key={n}>{inline(each, known)}</li>
            ))}
          </ol>
        );
      })}
    </>
  );
}

export function Runbook({ name, onClose }: { name: string; onClose: () => void }): JSX.Element {
  const known = useSignal<Map<string, string> | null>(null);
  const problem = useSignal("");
  useEffect(() => {
    ask("/console/runbook.md")
      .then(async (answer) => (known.value = sections(await answer.text())))
      .catch((error: unknown) => (problem.value = error instanceof ApiError ? error.message : String(error)));
  }, []);
  const section = known.value?.get(name);
  return (
    <Drawer title={name} sub="Runbook" onClose={onClose}>
      <div class="prose">
        {problem.value && <Problem message={problem.value} />}
        {!known.value && !problem.value && <Skeleton lines={6} />}
        {known.value && (section ? <Text text={section} known={known.value} /> : <p>The runbook has nothing about {name}.</p>)}
      </div>
    </Drawer>
  );
}
