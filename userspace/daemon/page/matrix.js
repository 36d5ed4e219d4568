// Node by node: how far the memory of each is from the CPUs of each. Rows are the nodes of the CPUs.

import { element } from "./format.js";

const CAPTION = "Relative distance from the CPUs of a node (row) to the memory of a node (column); 10 is local";

export class MatrixView {
  constructor(root) {
    this.root = root;
  }

  /** Needed again only when the machine itself changed. */
  update({ topology }) {
    const ids = topology.nodes.map((node) => node.node);
    const most = Math.max(1, ...topology.nodes.flatMap((node) => Object.values(node.distances)));
    const head = element("tr", {}, element("td"), ids.map((id) => element("th", { scope: "col" }, `node ${id}`)));
    const body = topology.nodes.map((node) => element(
      "tr",
      {},
      element("th", { scope: "row" }, `node ${node.node}`),
      ids.map((id) => cell(node.distances[id], most)),
    ));
    this.root.replaceChildren(element("table", {}, element("caption", { class: "quiet" }, CAPTION), element("thead", {}, head), element("tbody", {}, body)));
  }
}

/** The farther, the darker; a distance that the firmware does not tell stays blank. */
function cell(distance, most) {
  if (distance === undefined) return element("td", {}, "–");
  return element("td", { style: `background: rgba(var(--heat), ${(0.45 * distance) / most})` }, String(distance));
}
