// Node by node: who uses memory of which node, and how far it is. Rows are the nodes of the CPUs, columns those of
// the memory. What is local is quiet: the eye is to find the rest.

import { element, percent, short } from "./format.js";

const MOVED = "moved: pages that were on another node, and were moved at once.";

const KINDS = {
  accesses: {
    label: "pages touched",
    caption: "Pages of a node (column) that CPUs of a node (row) touched in the last minute, by scan, and their share of the row",
    cell: (state, from, to) => state.accesses?.get(`${from}>${to}`),
    none: "No probe counts touched pages on this host; status and doctor say why.",
  },
  distances: {
    label: "distances",
    caption: "Relative distance from the CPUs of a node (row) to the memory of a node (column); 10 is local",
    cell: (state, from, to) => state.topology.nodes.find((node) => node.node === from)?.distances[to],
    none: "The firmware reports no distances.",
  },
};

export class MatrixView {
  /** What was chosen; before, accesses where there are some. */
  #chosen = null;
  #shown = null;
  #inputs = new Map();

  constructor(root, choice, changed) {
    this.root = root;
    for (const [kind, { label }] of Object.entries(KINDS)) {
      const input = element("input", { type: "radio", name: "matrix", value: kind });
      input.addEventListener("change", () => {
        this.#chosen = kind;
        changed();
      });
      this.#inputs.set(kind, input);
      choice.append(element("label", {}, input, ` ${label}`));
    }
  }

  update(state) {
    if (!state.topology) return;
    const seen = [...(state.accesses?.values() ?? [])].some((pages) => pages > 0);
    const kind = this.#chosen ?? (seen ? "accesses" : "distances");
    this.#inputs.get(kind).checked = true;
    const { caption, cell, none } = KINDS[kind];
    const ids = state.topology.nodes.map((node) => node.node);
    // Of pages that were moved at once it is not known where they had been.
    const unknown = kind === "accesses" && ids.some((from) => cell(state, from, "unknown") > 0);
    const columns = unknown ? [...ids, "unknown"] : ids;
    const rows = ids.map((from) => columns.map((to) => cell(state, from, to)));
    const sampled = kind === "accesses" ? sampling(state.workloads) : "";
    // Drawn only when it changed: this is asked for with each sample.
    const shown = JSON.stringify([kind, columns, rows, sampled]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    const known = rows.flat().filter((value) => value !== undefined);
    if (known.length === 0) {
      this.root.replaceChildren(element("p", { class: "quiet" }, none));
      return;
    }
    const head = element("tr", {}, element("td"), columns.map((id) => (
      id === "unknown"
        ? element("th", { scope: "col", title: MOVED }, "moved")
        : element("th", { scope: "col" }, element("span", { class: "hidden" }, "node "), String(id))
    )));
    const most = Math.max(...known);
    const draw = kind === "accesses" ? counts : (values, own) => distances(values, own, most);
    const body = rows.map((values, index) => element(
      "tr",
      {},
      element("th", { scope: "row" }, `node ${ids[index]}`),
      draw(values, index),
    ));
    // A machine with many nodes scrolls its table, not what is said about it.
    const table = element("table", { "aria-describedby": "matrix-says", class: columns.length > 5 ? "many" : null, style: `--columns: ${columns.length + 1}` }, element("thead", {}, head), element("tbody", {}, body));
    this.root.replaceChildren(
      element("div", { class: "scroll", tabindex: "0", role: "group", "aria-labelledby": "matrix-title" }, table),
      element("p", { class: "quiet", id: "matrix-says" }, [caption, unknown ? MOVED : "", sampled].filter(Boolean).join(". ").replaceAll("..", ".")),
    );
  }
}

/** Pages and their share of the row. The larger the share of another node, the darker. */
function counts(values, own) {
  const sum = values.reduce((sum, value) => sum + (value ?? 0), 0);
  return values.map((value, index) => {
    if (value === undefined) return element("td", {}, "–");
    const share = sum > 0 ? value / sum : 0;
    const heat = index === own ? 0 : share;
    return element(
      "td",
      { class: index === own ? "own" : null, style: heat > 0 ? `--heat: ${(0.08 + 0.42 * heat).toFixed(3)}` : null, title: `${value} pages` },
      short(value),
      sum > 0 ? element("span", { class: "share" }, ` ${percent(share)}`) : null,
    );
  });
}

function distances(values, own, most) {
  return values.map((value, index) => (
    value === undefined
      ? element("td", {}, "–")
      : element("td", { class: index === own ? "own" : null, style: index === own ? null : `--heat: ${((0.3 * value) / most).toFixed(3)}` }, String(value))
  ));
}

/** Who is on the map: silence of the others means nothing. */
function sampling(workloads) {
  let on = 0;
  let all = 0;
  for (const { workload } of workloads.values()) {
    const state = workload.activity?.sampling;
    if (state === undefined) continue;
    all += 1;
    if (state === "on") on += 1;
  }
  return `The kernel samples ${on} of ${all} workloads; of the others this says nothing.`;
}
