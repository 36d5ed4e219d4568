// Node by node: distances, and who reaches where. Rows are the nodes of the CPUs, columns those of the memory.

import { bytes, element } from "./format.js";

const KINDS = {
  accesses: {
    label: "remote accesses",
    caption: "Pages that CPUs of a node (row) were seen to use on a node (column), sampled by the kernel",
    cell: (state, from, to) => state.matrix?.[from]?.[to],
    text: (value) => bytes(value),
  },
  distances: {
    label: "distances",
    caption: "Relative distance from the CPUs of a node (row) to the memory of a node (column); 10 is local",
    cell: (state, from, to) => state.topology.nodes.find((node) => node.node === from)?.distances[to],
    text: String,
  },
};

export class MatrixView {
  #kind = "distances";

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
    const { caption, cell, text } = KINDS[this.#kind];
    const ids = state.topology.nodes.map((node) => node.node);
    const rows = ids.map((from) => ids.map((to) => cell(state, from, to)));
    const known = rows.flat().filter((value) => value !== undefined);
    if (known.length === 0) {
      this.root.replaceChildren(element("p", { class: "quiet" }, "The kernel samples no accesses here; status and doctor say why."));
      return;
    }
    const most = Math.max(...known, 1);
    const head = element("tr", {}, element("td"), ids.map((id) => element("th", { scope: "col" }, `node ${id}`)));
    const body = rows.map((values, index) => element(
      "tr",
      {},
      element("th", { scope: "row" }, `node ${ids[index]}`),
      values.map((value) => element(
        "td",
        { style: `background: rgba(var(--heat), ${value === undefined ? 0 : (0.45 * value) / most})` },
        value === undefined ? "–" : text(value),
      )),
    ));
    this.root.replaceChildren(element("table", {}, element("caption", { class: "quiet" }, caption), element("thead", {}, head), element("tbody", {}, body)));
  }
}
