// Builds the console into the gateway's package: `node build.mjs`; with --check it compares instead of writing.
// The same sources give the same bytes: every tool is pinned by package-lock.json.
import { createHash } from "node:crypto";
import { mkdir, readFile, readdir, writeFile } from "node:fs/promises";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "../penstock/gateway/api/static");
const digest = (bytes) => createHash("sha256").update(bytes).digest("hex");

async function sources(directory) {
  const found = [];
  for (const entry of await readdir(directory, { withFileTypes: true })) {
    if (["node_modules", "tests"].includes(entry.name)) continue;
    const path = join(directory, entry.name);
    if (entry.isDirectory()) found.push(...(await sources(path)));
    else found.push(path);
  }
  return found;
}

async function made() {
  const bundle = await build({
    absWorkingDir: here,
    entryPoints: { app: "src/main.tsx" },
    bundle: true,
    minify: true,
    write: false,
    outdir: "out",
    format: "esm",
    target: ["es2022"],
    jsx: "automatic",
    jsxImportSource: "preact",
    legalComments: "none",
    charset: "utf8",
  });
  const files = new Map();
  for (const file of bundle.outputFiles) files.set(file.path.split("/").pop(), Buffer.from(file.contents));
  files.set("icon.svg", await readFile(join(here, "src/icon.svg")));
  let page = await readFile(join(here, "src/index.html"), "utf8");
  for (const [name, bytes] of files) page = page.replaceAll(`/console/${name}`, `/console/${name}?v=${digest(bytes).slice(0, 12)}`);
  files.set("index.html", Buffer.from(page));
  const manifest = { sources: {}, built: {} };
  const paths = (await sources(here)).map((path) => relative(here, path)).sort();
  for (const path of paths) manifest.sources[path] = digest(await readFile(join(here, path)));
  for (const name of [...files.keys()].sort()) manifest.built[name] = digest(files.get(name));
  files.set("manifest.json", Buffer.from(JSON.stringify(manifest, null, 1) + "\n"));
  return files;
}

const files = await made();
let total = 0;
if (process.argv.includes("--check")) {
  for (const [name, bytes] of files) {
    const there = await readFile(join(target, name)).catch(() => Buffer.alloc(0));
    if (!there.equals(bytes)) {
      console.error(`${name} is not what these sources make: run 'make console'`);
      process.exitCode = 1;
    }
  }
  if (!process.exitCode) console.log("the built console is what these sources make");
} else {
  await mkdir(target, { recursive: true });
  for (const [name, bytes] of files) {
    await writeFile(join(target, name), bytes);
    if (name !== "manifest.json") total += bytes.length;
  }
  console.log(`console: ${files.size} files, ${(total / 1024).toFixed(0)} KiB`);
}
