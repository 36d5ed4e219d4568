// A workload in full: what it holds, what is promised, why it was placed there, and what happened to it.

import { eventItem } from "./events.js";
import { fetchJson } from "./stream.js";
import { bytes, element, nodeColour, percent, rate } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

export class DetailView {
  #key = null;

  constructor(dialog, title, body, close) {
    Object.assign(this, { dialog, title, body });
    close.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      this.#key = null;
    });
  }

  async open(state, key) {
    this.#key = key;
    const row = state.workloads.get(key);
    if (!row) return;
    this.title.textContent = row.workload.workload;
    this.live = element("div");
    this.rest = element("div");
    this.body.replaceChildren(this.live, this.rest);
    this.update(state);
    if (!this.dialog.open) this.dialog.showModal();
    const name = row.allocation?.name ?? row.workload.workload;
    const page = await fetchJson(`api/v1/events?workload=${encodeURIComponent(name)}`).catch(() => null);
    if (this.#key === key) this.rest.replaceChildren(...this.#rest(row, page?.events ?? []));
  }

  /** Shows the latest figures while it is open. */
  update(state) {
    const row = this.#key === null ? null : state.workloads.get(this.#key);
    if (!row) {
      if (this.#key !== null) this.live.replaceChildren(element("p", { class: "notice" }, "This workload is gone."));
      return;
    }
    this.live.replaceChildren(facts(row), byNode(row), history(row));
  }

  #rest(row, events) {
    const parts = [];
    if (row.allocation) parts.push(promise(row.allocation), settings(row.allocation), ...decision(row.allocation.explanation));
    else parts.push(element("p", { class: "quiet" }, "It has no guarantee. Pages on other nodes are remote, not missed."));
    parts.push(element("h3", {}, "What happened"));
    parts.push(events.length > 0
      ? element("ol", {}, events.reverse().map(eventItem))
      : element("p", { class: "quiet" }, "Nothing that is still remembered."));
    return parts;
  }
}

function table(caption, head, rows) {
  return element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, head.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, rows.map((cells) => element("tr", {}, cells.map((cell, index) => (
      index === 0 ? element("th", { scope: "row" }, cell) : element("td", {}, cell)
    ))))),
  );
}

function facts(row) {
  const { workload, rates, totals, locality } = row;
  const words = locality.of === "promised" ? "of its memory lies on the promised nodes" : "of its allocations were local";
  const said = [
    `${workload.kind}${workload.cgroup ? `, cgroup ${workload.cgroup}` : ""}.`,
    `${bytes(totals.resident ?? NaN)} resident; ${percent(locality.share)} ${words}.`,
    totals.counted ? `Now ${rate(rates.local)} local and ${rate(rates.remote)} remote.` : "What it allocates is not counted.",
  ];
  if (workload.oomKills) said.push(`${workload.oomKills} of its processes were killed for want of memory.`);
  return element("p", {}, said.join(" "));
}

function byNode(row) {
  return table("Memory by node", ["node", "resident", "allocated local", "allocated remote", "missed"], row.workload.nodes.map((node) => [
    String(node.node),
    bytes(row.totals.byNode.find((part) => part.node === node.node)?.bytes ?? NaN),
    bytes(node.allocated?.localBytes ?? NaN),
    bytes(node.allocated?.remoteBytes ?? NaN),
    node.missedBytes === undefined ? "–" : bytes(node.missedBytes),
  ]));
}

function history(row) {
  const lines = [["local", "local", nodeColour(2)], ["remote", "remote", nodeColour(1)]];
  const most = Math.max(1, ...row.history.flatMap((point) => [point.local, point.remote]));
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 300 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "history");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `allocation rates of the last ${row.history.length} seconds, up to ${rate(most)}`);
  for (const [, field, colour] of lines) {
    const line = document.createElementNS(SVG, "polyline");
    const points = row.history.map((point, index) => {
      const x = 300 - (row.history.length - 1 - index);
      return `${x},${99 - (98 * point[field]) / most}`;
    });
    line.setAttribute("points", points.join(" "));
    line.style.stroke = colour;
    svg.append(line);
  }
  const legend = element("ul", { class: "legend" }, lines.map(([name, , colour]) => (
    element("li", { style: `--swatch: ${colour}` }, `${name}, at most ${rate(Math.max(0, ...row.history.map((point) => point[name])))}`)
  )));
  return element("figure", {}, element("figcaption", {}, "Allocation in the last five minutes"), svg, legend);
}

function promise(allocation) {
  return table("Promised", ["kind", "nodes", "amount"], [
    ["cpu", allocation.nodes, allocation.cpus || "none"],
    ...allocation.memory.map((block) => [block.kind, block.nodes, bytes(block.bytes)]),
  ]);
}

/** What became of a knob that did not hold what was written. */
const DRIFTED = {
  repaired: (drift) => `the same; was ${drift.found ?? "gone"}, ${drift.count} times`,
  waiting: (drift) => `${drift.found ?? "gone"}; will be written again`,
  left: (drift) => `${drift.found ?? "gone"}; left: somebody else keeps writing it`,
  ineffective: (drift) => `the same, of which the kernel gives ${drift.found ?? "nothing"}`,
};

function settings(allocation) {
  const own = allocation.drift.filter((drift) => drift.cgroup === allocation.cgroup);
  const drifted = new Map(own.map((drift) => [drift.knob, drift]));
  return table("Enforced", ["knob", "wanted", "found"], Object.entries(allocation.settings).map(([knob, value]) => {
    const drift = drifted.get(knob);
    return [knob, value, drift ? DRIFTED[drift.state]?.(drift) ?? drift.found : "the same"];
  }));
}

function decision(explanation) {
  if (!explanation) return [];
  return explanation.merges.flatMap((merge, index) => [
    element("h3", {}, explanation.merges.length > 1 ? `Decision ${index + 1}` : "Decision"),
    element("p", {}, `${merge.accepted ? "Accepted" : "Refused"}: nodes ${merge.nodes ?? "any"}.`),
    table("Hints: where each resource could be served", ["resource", "node sets (* preferred)"], merge.hints.map((hint) => [
      hint.resource,
      hint.sets ? hint.sets.map((set) => `${set.nodes}${set.preferred ? "*" : ""}`).join("  ") || "none" : "anywhere",
    ])),
    table("Candidates: hints that fit together", ["nodes", "preferred", "verdict"], merge.candidates.map((candidate) => [
      candidate.nodes, candidate.preferred ? "yes" : "no", candidate.verdict,
    ])),
  ]);
}
