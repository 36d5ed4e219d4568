// Holds what the page shows against /metrics: the same figures, in the same second.
//
// Figures move. A figure of the page agrees if it lies between two scrapes, one before it was shown and one after, but
// for the digits that the page does not show. What goes up and down may have been elsewhere between the two, so that a
// figure that does not agree is looked at again; one that is wrong never does.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const ATTEMPTS = 30;

/** The least and the most that a text such as "1.25 GiB" stands for; nothing for "–". */
export function range(text) {
  const found = /^(\d+(?:\.(\d+))?) (\w+)$/.exec(text.trim());
  if (!found) return null;
  const unit = 1024 ** UNITS.indexOf(found[3]);
  const half = (0.5 / 10 ** (found[2]?.length ?? 0)) * unit;
  const value = Number(found[1]) * unit;
  return found[3] === "B" ? { least: value, most: value } : { least: value - half, most: value + half };
}

/** The samples of a scrape, by name and labels: `name{numa_node="0",workload="a"}`, labels in the order of the alphabet. */
export async function scrape(url) {
  const response = await fetch(new URL("metrics", url));
  const samples = new Map();
  for (const line of (await response.text()).split("\n")) {
    const found = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const labels = [...(found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([label]) => label);
    samples.set(key(found[1], labels), Number(found[3]));
  }
  return samples;
}

function key(name, labels) {
  return `${name}{${[...labels].sort().join(",")}}`;
}

/** A label as the exporter writes it. */
function label(name, value) {
  return `${name}="${value.replaceAll("\\", "\\\\").replaceAll('"', '\\"').replaceAll("\n", "\\n")}"`;
}

/** The labels of a workload: those of Kubernetes for a container of a pod. */
function workloadLabels(name) {
  const parts = name.split("/");
  if (parts.length !== 3 || parts.includes("")) return [label("workload", name)];
  return ["namespace", "pod", "container"].map((key, i) => label(key, parts[i]));
}

/** Sums of samples; nothing if none is there. */
function sum(samples, keys) {
  const values = keys.map((one) => samples.get(one)).filter((value) => value !== undefined);
  return values.length > 0 ? values.reduce((a, b) => a + b, 0) : null;
}

function holds(text, before, after) {
  // Not drawn yet.
  if (text === undefined) return false;
  const shown = range(text);
  if (before === null || after === null) return shown === null;
  if (shown === null) return false;
  return shown.most >= Math.min(before, after) && shown.least <= Math.max(before, after);
}

/** Waits until the page has drawn a sample that was taken after now. */
async function drawn(page) {
  const count = () => page.evaluate(() => performance.getEntriesByName("numaward-update").length);
  const seen = await count();
  await page.waitForFunction((seen) => performance.getEntriesByName("numaward-update").length >= seen + 2, { timeout: 60_000 }, seen);
}

/** What the node cards show of memory: by node, by name. */
const cards = (page) => page.$$eval(".node", (cards) => cards.map((card) => ({
  node: card.dataset.node,
  ...Object.fromEntries([...card.querySelectorAll("[data-kind=memory] [data-figure]")].map((figure) => [figure.dataset.figure, figure.textContent])),
})));

/** The rows of the table by node of the workload that is open. */
const byNode = (page) => page.evaluate(() => {
  const table = [...document.querySelectorAll("#detail-body table")].find((table) => table.caption?.textContent === "Memory and CPU time by node");
  return [...(table?.tBodies[0].rows ?? [])].map((row) => [...row.cells].map((cell) => cell.textContent));
});

async function attempt(page, url, compare) {
  let wrong = [];
  for (let turn = 0; turn < ATTEMPTS; turn += 1) {
    const before = await scrape(url);
    await drawn(page);
    const seen = await compare.look();
    const after = await scrape(url);
    wrong = compare.figures(seen).filter(({ text, keys }) => !holds(text, sum(before, keys), sum(after, keys)))
      .map(({ what, text, keys }) => `${what}: the page shows ${text}, /metrics had ${sum(before, keys)}, then ${sum(after, keys)}`);
    if (wrong.length === 0) return;
  }
  throw new Error(`the page does not agree with /metrics:\n  ${wrong.join("\n  ")}`);
}

/** Compares the nodes and the first workloads of the list; says how many figures there were. */
export async function agree(page, url) {
  let count = 0;
  await attempt(page, url, {
    look: () => cards(page),
    figures: (seen) => {
      const figures = seen.flatMap((card) => {
        const of = (name, labels) => [key(name, [label("numa_node", card.node), label("kind", "memory"), ...labels])];
        return [
          { what: `node ${card.node}, memory`, text: card.total, keys: of("numaward_node_memory_bytes", [label("state", "total")]) },
          { what: `node ${card.node}, free`, text: card.free, keys: of("numaward_node_memory_unused_bytes", []) },
        ];
      });
      count += figures.length;
      return figures;
    },
  });
  const { workloads } = await (await fetch(new URL("api/v1/workloads", url))).json();
  const names = workloads.map(({ workload }) => workload);
  const alone = new Set(names.filter((name) => names.indexOf(name) === names.lastIndexOf(name)));
  const rows = await page.$$eval("#rows tr[data-key] a", (links) => links.map((link) => link.textContent));
  const chosen = rows.filter((name) => alone.has(name)).slice(0, 4);
  if (chosen.length === 0) throw new Error("no workload to compare");
  for (const name of chosen) {
    await page.evaluate((name) => [...document.querySelectorAll("#rows tr[data-key] a")].find((link) => link.textContent === name)?.click(), name);
    await page.waitForSelector("#detail[open]");
    const figures = (rows) => rows.flatMap(([node, resident, local, remote]) => {
      const labels = [...workloadLabels(name), label("numa_node", node)];
      const of = (metric, more) => key(metric, [...labels, ...more]);
      return [
        { what: `${name}, node ${node}, resident`, text: resident, keys: ["anon", "file", "kernel"].map((type) => of("numaward_memory_resident_bytes", [label("type", type)])) },
        { what: `${name}, node ${node}, local`, text: local, keys: [of("numaward_memory_allocated_bytes_total", [label("locality", "local")])] },
        { what: `${name}, node ${node}, remote`, text: remote, keys: [of("numaward_memory_allocated_bytes_total", [label("locality", "remote")])] },
      ];
    });
    await attempt(page, url, {
      look: () => byNode(page),
      figures: (rows) => {
        if (rows.length === 0) throw new Error(`${name} has no table by node`);
        count += rows.length * 3;
        return figures(rows);
      },
    });
    await page.keyboard.press("Escape");
    await page.waitForFunction(() => !document.querySelector("#detail").open);
  }
  return { count, workloads: chosen };
}
