// The machine as a picture: sockets hold nodes, nodes hold CPUs and memory. Each bar carries its numbers.

import { Sparkline } from "./chart.js";
import { bytes, counted, element, list, rate } from "./format.js";

const LEGEND = [
  ["guaranteed", "--guaranteed"],
  ["used", "--used"],
  ["reserved", "--reserved"],
  ["local", "--local"],
  ["remote", "--remote"],
  ["others ran on an exclusive CPU", "--bad"],
];

export class MachineView {
  #cards = new Map();

  constructor(root, legend) {
    this.root = root;
    for (const [name, colour] of LEGEND) {
      legend.append(element("li", { style: `--swatch: var(${colour})` }, name));
    }
  }

  /** Builds the picture; needed again only when the machine itself changed. */
  build(topology) {
    this.#cards.clear();
    this.root.replaceChildren();
    const placed = new Set();
    const sockets = together(topology.sockets).map(({ ids, cores, nodes }) => ({
      title: `${ids.length === 1 ? "Socket" : "Sockets"} ${ids.join(", ")}: ${counted(cores, "core")}`,
      nodes,
    }));
    for (const socket of sockets) socket.nodes.forEach((node) => placed.add(node));
    const apart = topology.nodes.filter((node) => !placed.has(node.node)).map((node) => node.node);
    if (apart.length > 0) sockets.push({ title: "Without CPUs", nodes: apart });
    const byId = new Map(topology.nodes.map((node) => [node.node, node]));
    for (const socket of sockets) {
      const nodes = element("div", { class: "nodes" });
      for (const id of socket.nodes) {
        const node = byId.get(id);
        if (node) nodes.append(this.#card(node, topology));
      }
      this.root.append(element("section", { class: "socket", "aria-label": socket.title, style: `--nodes: ${socket.nodes.length}` }, element("h3", {}, socket.title), nodes));
    }
  }

  #card(node, topology) {
    const isolated = new Set(list(topology.isolatedCpus));
    const cpus = new Map();
    const groups = element("div", { class: "cpus", role: "img" });
    for (const cores of cachesOf(node, topology)) {
      const cache = element("div", { class: "cache" });
      for (const siblings of cores) {
        const core = element("span", { class: "core" });
        for (const cpu of siblings) {
          const square = element("span", { class: "cpu", title: `CPU ${cpu}` });
          if (isolated.has(cpu)) square.dataset.isolated = "";
          cpus.set(cpu, square);
          core.append(square);
        }
        cache.append(core);
      }
      groups.append(cache);
    }
    const bars = element("div", { class: "bars" });
    const spark = new Sparkline(120, 22);
    const local = element("span", { class: "local", title: "allocated on this node by its own CPUs" });
    const remote = element("span", { class: "remote", title: "allocated on this node by CPUs of other nodes" });
    const card = element(
      "article",
      { class: "node", "data-node": node.node },
      element("h4", {}, `Node ${node.node}`, element("span", { class: "quiet" }, ` ${cpusOf(node)}`)),
      cpus.size > 0 ? groups : null,
      bars,
      element("div", { class: "flows" }, local, remote, spark.element),
    );
    this.#cards.set(node.node, { cpus, groups, bars, byKind: new Map(), spark, local, remote });
    return card;
  }

  /** Shows the guaranteed, the used and the free memory. */
  update(state) {
    const owners = new Map();
    for (const allocation of state.allocations.allocations) {
      for (const cpu of list(allocation.cpus)) owners.set(cpu, allocation.name);
    }
    const capacities = new Map(state.allocations.nodes.map((node) => [node.node, node]));
    for (const node of state.nodes) {
      const card = this.#cards.get(node.node);
      if (!card) continue;
      this.#cpus(card, owners, state.intruded);
      // What all have comes first.
      for (const memory of [...node.memory].reverse()) {
        if (memory.kind === "memory" || memory.totalBytes > 0) {
          bar(card, memory, capacities.get(node.node)?.memory.find((held) => held.kind === memory.kind));
        }
      }
      flows(card, node.node, state);
    }
  }

  #cpus(card, owners, intruded) {
    let exclusive = 0;
    let dirty = 0;
    for (const [cpu, square] of card.cpus) {
      const owner = owners.get(cpu);
      if (owner !== undefined) exclusive += 1;
      const others = owner !== undefined && intruded.has(cpu);
      if (others) dirty += 1;
      const isolated = square.dataset.isolated !== undefined ? ", isolated" : "";
      const state = owner === undefined ? null : others ? "intruded" : "exclusive";
      const title = owner === undefined
        ? `CPU ${cpu}: shared${isolated}`
        : `CPU ${cpu}: exclusive to ${owner}${isolated}${others ? ", but others ran there within the last minute" : ""}`;
      if (state === null) delete square.dataset.state;
      else if (square.dataset.state !== state) square.dataset.state = state;
      if (square.title !== title) square.title = title;
    }
    const label = `${counted(card.cpus.size, "CPU")}, ${exclusive} exclusive${dirty > 0 ? `, others ran on ${dirty} of these within the last minute` : ""}`;
    if (card.groups.getAttribute("aria-label") !== label) card.groups.setAttribute("aria-label", label);
  }
}

/** A kind of memory: what is used of it, with numbers, and below what is reserved and guaranteed. */
function bar(card, memory, held) {
  const parts = card.byKind.get(memory.kind) ?? makeBar(card, memory.kind);
  const { totalBytes: total, freeBytes: free } = memory;
  const used = free === undefined ? NaN : total - free;
  const [reserved, guaranteed] = [held?.reservedBytes ?? 0, held?.promisedBytes ?? 0];
  const width = (value) => `${total > 0 && value > 0 ? Math.min(100, (value / total) * 100) : 0}%`;
  parts.fill.style.width = width(used);
  parts.reserved.style.width = width(reserved);
  parts.guaranteed.style.width = width(guaranteed);
  parts.set("used", bytes(used));
  parts.set("free", bytes(free ?? NaN));
  parts.set("total", bytes(total));
  parts.set("guaranteed", bytes(guaranteed));
  parts.label.classList.toggle("none", guaranteed === 0);
  parts.lane.title = `${bytes(reserved)} reserved, ${bytes(guaranteed)} guaranteed of ${bytes(total)}`;
}

function makeBar(card, kind) {
  const figures = {};
  const figure = (name) => (figures[name] = element("span", { "data-figure": name }));
  const fill = element("span", { class: "fill" });
  const reserved = element("span", { class: "reserved" });
  const guaranteed = element("span", { class: "guaranteed" });
  const label = element("span", { class: "guarantee" }, figure("guaranteed"), " guaranteed");
  const lane = element("div", { class: "lane" }, reserved, guaranteed);
  card.bars.append(element(
    "div",
    { class: "kind", "data-kind": kind },
    element("p", {}, element("b", {}, kind), " ", figure("total"), label),
    element("div", { class: "gauge" }, fill, element("span", { class: "text" }, figure("used"), " used"), element("span", { class: "text" }, figure("free"), " free")),
    lane,
  ));
  const set = (name, text) => {
    if (figures[name].textContent !== text) figures[name].textContent = text;
  };
  const parts = { fill, reserved, guaranteed, label, lane, set };
  card.byKind.set(kind, parts);
  return parts;
}

function flows(card, node, state) {
  const { rates, trend } = state.nodeRates.get(node) ?? {};
  const set = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };
  set(card.local, rates ? `local ${rate(rates.local)}` : "not counted");
  set(card.remote, rates ? `remote ${rate(rates.remote)}` : "");
  if (trend) card.spark.draw(node, trend, state.at, (most, known) => (known ? `at most ${rate(most)}` : "not known"));
}

function cpusOf(node) {
  if (!node.cpus) return "memory only";
  return `${list(node.cpus).length === 1 ? "CPU" : "CPUs"} ${node.cpus}`;
}

/** The CPUs of a node as last-level caches of cores of SMT siblings. What the machine does not say is one group. */
function cachesOf(node, topology) {
  const own = new Set(list(node.cpus));
  const cores = [];
  const seen = new Set();
  for (const { cpus } of topology.cores ?? []) {
    const siblings = list(cpus).filter((cpu) => own.has(cpu));
    siblings.forEach((cpu) => seen.add(cpu));
    if (siblings.length > 0) cores.push(siblings);
  }
  for (const cpu of own) if (!seen.has(cpu)) cores.push([cpu]);
  const groups = topology.lastLevelCaches.map(({ cpus }) => {
    const shared = new Set(list(cpus));
    return cores.filter(([first]) => shared.has(first));
  });
  const grouped = new Set(groups.flat());
  return [...groups, cores.filter((core) => !grouped.has(core))].filter((group) => group.length > 0);
}

/** The sockets, those together that share a node: some virtual machines spread the CPUs of a node over several. */
function together(sockets) {
  const groups = [];
  for (const socket of sockets) {
    const group = { ids: [socket.socket], cores: socket.cores, nodes: list(socket.nodes) };
    for (const other of groups.filter(({ nodes }) => nodes.some((node) => group.nodes.includes(node)))) {
      groups.splice(groups.indexOf(other), 1);
      group.ids.push(...other.ids);
      group.cores += other.cores;
      group.nodes.push(...other.nodes);
    }
    group.ids.sort((a, b) => a - b);
    group.nodes = [...new Set(group.nodes)].sort((a, b) => a - b);
    groups.push(group);
  }
  return groups.sort((a, b) => a.ids[0] - b.ids[0]);
}
