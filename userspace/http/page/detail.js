// A workload in full: what it holds, what is promised, why it was placed there, and what happened to it.

import { eventItem } from "./events.js";
import { fetchJson } from "./stream.js";
import { bytes, counted, element, nodeColour, percent, rate, seconds } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
/** So many of those who ran on exclusive CPUs are named. */
const INTRUDERS = 8;

export class DetailView {
  #key = null;

  constructor(dialog, title, body, close) {
    Object.assign(this, { dialog, title, body });
    close.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      // The event comes late: another workload may be open by now.
      if (!dialog.open) this.#key = null;
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
    const name = encodeURIComponent(row.workload.workload);
    const [page, intruders] = await Promise.all([
      fetchJson(`api/v1/events?workload=${name}`).catch(() => null),
      row.allocation?.cpus ? fetchJson(`api/v1/workloads/${name}/intruders`).catch(() => null) : null,
    ]);
    if (this.#key === key) this.rest.replaceChildren(...this.#rest(row, page?.events ?? [], intruders));
  }

  /** Shows the latest figures while it is open. */
  update(state) {
    const row = this.#key === null ? null : state.workloads.get(this.#key);
    if (!row) {
      if (this.#key !== null) this.live.replaceChildren(element("p", { class: "notice" }, "This workload is gone."));
      return;
    }
    const cpus = state.exclusiveCpus.filter((cpu) => cpu.workload === row.workload.workload);
    this.live.replaceChildren(facts(row), byNode(row), ...hugepages(row), ...accesses(row.workload.activity), ...exclusiveCpus(cpus), history(row));
  }

  #rest(row, events, intruders) {
    const parts = whoRan(intruders);
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

function hugepages(row) {
  const rows = row.workload.nodes.flatMap((node) => (node.hugepages ?? []).map((of) => [
    of.size,
    String(node.node),
    bytes(of.residentBytes ?? NaN),
    bytes(of.allocated?.localBytes ?? NaN),
    bytes(of.allocated?.remoteBytes ?? NaN),
    of.missedBytes === undefined ? "–" : bytes(of.missedBytes),
  ]));
  if (rows.length === 0) return [];
  return [table("Hugepages", ["size", "node", "resident", "allocated local", "allocated remote", "missed"], rows)];
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

/** Why silence is no good news. */
const SAMPLING = {
  on: "The kernel samples its accesses.",
  off: "The kernel samples no accesses: NUMA balancing is off, or there is one node.",
  mode2: "The kernel samples no accesses: NUMA balancing serves tiering of memory only.",
  skipped_cpuset: "The kernel does not sample its accesses, because it may use one node only.",
  bound: "The kernel hardly samples its accesses, because of its memory policy.",
  unknown: "Whether the kernel samples its accesses is not known yet.",
};

function accesses(activity) {
  if (!activity?.sampling) return [];
  const estimate = activity.estimatedRemotePercent;
  const guess = estimate === undefined ? "" : ` By where its threads ran and its memory lies, an estimated ${estimate} % of them are remote.`;
  const said = element("p", {}, (SAMPLING[activity.sampling] ?? activity.sampling) + guess);
  const seen = (activity.accesses ?? []).filter((of) => of.localPages > 0 || of.remotePages > 0);
  if (seen.length === 0) return [said];
  const places = (of) => (of.remote ?? []).map(({ memoryNode, pages }) => (
    memoryNode === undefined ? `${pages} moved at once` : `node ${memoryNode}: ${pages}`
  ));
  return [said, table("Sampled accesses, in pages", ["from CPUs of", "local", "remote", "where"], seen.map((of) => [
    `node ${of.node}`, String(of.localPages), String(of.remotePages), places(of).join(", "),
  ]))];
}

function exclusiveCpus(cpus) {
  if (cpus.length === 0) return [];
  const head = ["CPU", "its own", "kernel threads", "host", "other workloads", "interrupts", "softirqs"];
  return [table("Who used its exclusive CPUs", head, cpus.map((cpu) => [
    String(cpu.cpu),
    ...[cpu.ownMicros, cpu.kernelThreadMicros, cpu.hostMicros, cpu.workloadMicros].map(seconds),
    String(cpu.hardInterrupts ?? "–"),
    String(cpu.softInterrupts ?? "–"),
  ]))];
}

function whoRan(intruders) {
  if (!intruders || intruders.intruders.length === 0) return [];
  const most = intruders.intruders.slice(0, INTRUDERS);
  const rest = intruders.intruders.slice(INTRUDERS);
  const sum = (field) => rest.reduce((sum, intruder) => sum + intruder[field], 0);
  const rows = most.map((intruder) => [
    intruder.command,
    intruder.workload ?? intruder.class.replaceAll("_", " "),
    seconds(intruder.micros),
    String(intruder.runs),
  ]);
  if (rest.length > 0) rows.push([`and ${counted(rest.length, "other")}`, "", seconds(sum("micros")), String(sum("runs"))]);
  return [table("Who else ran there", ["command", "what it is", "time", "times"], rows)];
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
    element("p", {}, `${merge.accepted ? "Accepted" : "Refused"}: nodes ${merge.nodes === "" ? "none" : merge.nodes ?? "any"}.`),
    merge.hints.length === 0 ? null : table("Hints: where each resource could be served", ["resource", "node sets (* preferred)"], merge.hints.map((hint) => [
      hint.resource,
      hint.sets ? hint.sets.map((set) => `${set.nodes}${set.preferred ? "*" : ""}`).join("  ") || "none" : "anywhere",
    ])),
    table(merge.hints.length ? "Candidates: hints that fit together" : "Candidates", ["nodes", "preferred", "verdict"], merge.candidates.map((candidate) => [
      candidate.nodes, candidate.preferred ? "yes" : "no", candidate.verdict,
    ])),
  ].filter((part) => part !== null));
}
