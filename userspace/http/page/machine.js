// The machine as a picture: sockets hold nodes, nodes hold CPUs and memory.

import { bytes, counted, element, list, nodeColour } from "./format.js";

const LEGEND = [
  ["shared CPU", "--shared"],
  ["exclusive CPU", "--exclusive"],
  ["exclusive CPU where others ran within a minute", "--bad"],
  ["reserved", "--reserved"],
  ["promised", "--promised"],
  ["used, not promised", "--used"],
  ["free", "--free"],
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
      this.root.append(element("section", { class: "socket", "aria-label": socket.title }, element("h3", {}, socket.title), nodes));
    }
  }

  #card(node, topology) {
    const isolated = new Set(list(topology.isolatedCpus));
    const cpus = new Map();
    const squares = element("div", { class: "cpus", role: "img" });
    for (const cpu of list(node.cpus)) {
      const square = element("span", { class: "cpu", title: `CPU ${cpu}` });
      if (isolated.has(cpu)) Object.assign(square.dataset, { isolated: "", state: "isolated" });
      cpus.set(cpu, square);
      squares.append(square);
    }
    const bar = element("div", { class: "bar-of", role: "img" });
    const parts = Object.fromEntries(["reserved", "promised", "used"].map((name) => {
      const part = element("span", { style: `background: var(--${name}); width: 0` });
      bar.append(part);
      return [name, part];
    }));
    const figures = element("dl");
    const card = element(
      "article",
      { class: "node", style: `--node: ${nodeColour(node.node)}` },
      element("h4", {}, `Node ${node.node}`, element("span", { class: "quiet" }, ` ${cpusOf(node)}`)),
      squares,
      bar,
      figures,
    );
    this.#cards.set(node.node, { cpus, squares, bar, parts, figures });
    return card;
  }

  /** Shows what is promised, used and free now. */
  update(state) {
    const owners = new Map();
    for (const allocation of state.allocations.allocations) {
      for (const cpu of list(allocation.cpus)) owners.set(cpu, allocation.name);
    }
    const promises = new Map(state.allocations.nodes.map((node) => [node.node, node]));
    for (const node of state.nodes) {
      const card = this.#cards.get(node.node);
      if (!card) continue;
      this.#cpus(card, owners, state.intruded);
      this.#memory(card, node, promises.get(node.node));
    }
  }

  #cpus(card, owners, intruded) {
    let exclusive = 0;
    let dirty = 0;
    for (const [cpu, square] of card.cpus) {
      const owner = owners.get(cpu);
      if (owner !== undefined) exclusive += 1;
      const isolated = square.dataset.isolated !== undefined;
      const others = owner !== undefined && intruded.has(cpu);
      if (others) dirty += 1;
      const state = owner === undefined ? (isolated ? "isolated" : null) : others ? "intruded" : "exclusive";
      const title = owner === undefined
        ? `CPU ${cpu}: shared`
        : `CPU ${cpu}: exclusive to ${owner}${others ? ", but others ran there within the last minute" : ""}`;
      if (state === null) delete square.dataset.state;
      else if (square.dataset.state !== state) square.dataset.state = state;
      if (square.title !== title) square.title = title;
    }
    const label = `${counted(card.cpus.size, "CPU")}, ${exclusive} exclusive${dirty > 0 ? `, others ran on ${dirty} of these within the last minute` : ""}`;
    if (card.squares.getAttribute("aria-label") !== label) card.squares.setAttribute("aria-label", label);
  }

  #memory(card, node, promises) {
    const base = node.memory.find((memory) => memory.kind === "memory");
    if (!base) return;
    const held = promises?.memory.find((memory) => memory.kind === "memory");
    const total = base.totalBytes;
    const free = base.freeBytes ?? 0;
    const reserved = held?.reservedBytes ?? 0;
    const promised = held?.promisedBytes ?? 0;
    // What is used beyond what is reserved and promised; the rest of the bar is free.
    const used = Math.max(0, total - free - reserved - promised);
    const width = (value) => `${total > 0 ? Math.min(100, (value / total) * 100) : 0}%`;
    for (const [name, value] of Object.entries({ reserved, promised, used })) {
      card.parts[name].style.width = width(value);
    }
    card.bar.setAttribute("aria-label", `memory: ${bytes(reserved)} reserved, ${bytes(promised)} promised, ${bytes(free)} free of ${bytes(total)}`);
    const figures = [["memory", bytes(total)], ["promised", bytes(promised)], ["used", bytes(total - free)], ["free", bytes(free)]];
    for (const memory of node.memory) {
      if (memory.kind !== "memory" && memory.totalBytes > 0) {
        figures.push([memory.kind, `${bytes(memory.freeBytes ?? NaN)} of ${bytes(memory.totalBytes)} free`]);
      }
    }
    card.figures.replaceChildren(...figures.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  }
}

function cpusOf(node) {
  if (!node.cpus) return "memory only";
  return `${list(node.cpus).length === 1 ? "CPU" : "CPUs"} ${node.cpus}`;
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
