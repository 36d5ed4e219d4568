// Node by node: who uses memory of which node, and how far it is. Rows are the nodes of the CPUs, columns those of
// the memory.

import { element, short } from "./format.js";

const MOVED = "moved: pages that were on another node, and were moved at once.";

const KINDS = {
  accesses: {
    label: "accesses",
    caption: "Pages that CPUs of a node (row) were seen to use on a node (column) in the last minute, as the kernel samples them",
    cell: (state, from, to) => state.accesses?.get(`${from}>${to}`),
    none: "No probe samples accesses on this host; status and doctor say why.",
  },
  distances: {
    label: "distances",
    caption: "Relative distance from the CPUs of a node (row) to the memory of a node (column); 10 is local",
    cell: (state, from, to) => state.topology.nodes.find((node) => node.node === from)?.distances[to],
    none: "The firmware reports no distances.",
  },
};

export class MatrixView {
  #kind = "distances";
  #shown = null;

  constructor(root, choice, changed) {
    this.root = root;
    for (const [kind, { label }] of Object.entries(KINDS)) {
      const input = element("input", { type: "radio", name: "matrix", value: kind, checked: kind === this.#kind });
      input.addEventListener("change", () => {
        this.#kind = kind;
        changed();
      });
      choice.append(element("label", {}, input, ` ${label}`));
    }
  }

  update(state) {
    if (!state.topology) return;
    const { caption, cell, none } = KINDS[this.#kind];
    const ids = state.topology.nodes.map((node) => node.node);
    // Of pages that were moved at once it is not known where they had been.
    const unknown = this.#kind === "accesses" && ids.some((from) => cell(state, from, "unknown") > 0);
    const columns = unknown ? [...ids, "unknown"] : ids;
    const rows = ids.map((from) => columns.map((to) => cell(state, from, to)));
    const sampled = this.#kind === "accesses" ? sampling(state.workloads) : "";
    // Drawn only when it changed: this is asked for with each sample.
    const shown = JSON.stringify([this.#kind, columns, rows, sampled]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    const known = rows.flat().filter((value) => value !== undefined);
    if (known.length === 0) {
      this.root.replaceChildren(element("p", { class: "quiet" }, none));
      return;
    }
    const most = Math.max(...known, 1);
    const head = element("tr", {}, element("td"), columns.map((id) => (
      id === "unknown"
        ? element("th", { scope: "col", title: MOVED }, "moved")
        : element("th", { scope: "col" }, element("span", { class: "hidden" }, "node "), String(id))
    )));
    const body = rows.map((values, index) => element(
      "tr",
      {},
      element("th", { scope: "row" }, `node ${ids[index]}`),
      values.map((value) => shade(value, most)),
    ));
    // A machine with many nodes scrolls its table, not what is said of it.
    const table = element("table", { "aria-describedby": "matrix-says" }, element("thead", {}, head), element("tbody", {}, body));
    this.root.replaceChildren(
      element("p", { class: "quiet", id: "matrix-says" }, caption),
      element("div", { class: "scroll", tabindex: "0", role: "group", "aria-labelledby": "matrix-title" }, table),
      ...[unknown ? MOVED : "", sampled].filter(Boolean).map((text) => element("p", { class: "quiet" }, text)),
    );
  }
}

/** The more, or the farther, the darker; what is not known stays blank. */
function shade(value, most) {
  if (value === undefined) return element("td", {}, "–");
  return element("td", { style: `background: rgba(var(--heat), ${(0.45 * value) / most})`, title: String(value) }, short(value));
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
