// What the page knows: the last sample, rates between samples, and what was before, from the daemon's history.
//
// Samples come once a second over the stream: the first is complete, the later ones hold what changed. Counters
// only grow; one that went back belongs to another workload, and its rate is not known for one sample. Rates that are
// shown are means of the last five seconds, as in the charts: one second says too little of what comes in bursts.
// Accesses between nodes are those of the last minute.

import { Recent, Trend } from "./chart.js";
import { list } from "./format.js";
import { verdictOf } from "./verdict.js";

/** Samples of a workload that are kept: five minutes. */
const HISTORY = 300;
/** For how long accesses count as recent, in milliseconds. */
const RECENT = 60_000;
/** After so many samples the daemon has some history of a workload that is new. */
const SOON = 10;
/** Longer names are no part of an address where there is another way. */
const LONGEST = 200;
/** How often it is asked who runs on exclusive CPUs, in milliseconds. */
const ASK = 5_000;

export class State {
  topology = null;
  version = null;
  status = null;
  nodes = [];
  /** Rates and their past by node. */
  nodeRates = new Map();
  workloads = new Map();
  allocations = { allocations: [], nodes: [], sharedCpus: "" };
  /** Whether the guarantees were requested successfully. */
  areGuaranteesKnown = false;
  /** Whether the request was answered, even with an error: before that, no guarantee is attributed to the kubelet. */
  #isAnswered = false;
  events = [];
  /** Pages used in the last minute, by "CPU's node>memory's node"; null where nothing is sampled. */
  accesses = null;
  exclusiveCpus = [];
  /** The exclusive CPUs on which others ran within the last minute. */
  intruded = new Set();
  /** Workloads of which no past is kept. */
  dropped = 0;
  /** Those of which some was when the page was opened, by key. */
  #kept = new Set();
  /** Counts of accesses, from the last minute's begin on. */
  #matrices = [];
  /** When the last sample was taken, in milliseconds of the daemon's clock. */
  at = null;
  revision = null;

  /** Takes in a sample; says whether allocations have to be fetched anew. */
  sample(sample) {
    // Its clock began anew: it is another daemon, which knows nothing of what was seen before.
    if (this.at !== null && sample.atMillis < this.at) this.#forget();
    const seconds = this.at === null ? null : (sample.atMillis - this.at) / 1000;
    this.at = sample.atMillis;
    this.nodes = sample.nodes;
    for (const node of sample.nodes) this.#node(node, seconds);
    this.#sampled(sample);
    this.exclusiveCpus = sample.exclusiveCpus ?? [];
    const seen = sample.full ? new Set() : null;
    for (const fresh of sample.workloads) {
      const key = keyOf(fresh);
      seen?.add(key);
      this.#take(key, fresh, seconds);
    }
    if (seen) {
      for (const key of this.workloads.keys()) if (!seen.has(key)) this.workloads.delete(key);
    } else {
      for (const key of sample.removed) this.workloads.delete(key);
      const changed = new Set(sample.workloads.map(keyOf));
      for (const [key, row] of this.workloads) if (!changed.has(key)) this.#settle(row, seconds);
    }
    const intruded = [...this.workloads.values()].flatMap(({ workload }) => list(workload.intrudedCpus));
    this.intruded = new Set(intruded);
    for (const row of this.workloads.values()) row.verdict = verdictOf(row, this);
    const stale = this.revision !== sample.promises;
    this.revision = sample.promises;
    return stale;
  }

  #forget() {
    this.workloads.clear();
    this.nodeRates.clear();
    this.#matrices = [];
    this.#kept.clear();
    this.at = null;
    this.revision = null;
  }

  #sampled({ atMillis: at, accesses }) {
    // Without counts, it begins anew.
    if (!accesses) this.#matrices = [];
    this.accesses = null;
    if (!accesses) return;
    this.#matrices.push({ at, pages: pagesOf(accesses) });
    while (this.#matrices.length > 2 && at - this.#matrices[1].at >= RECENT) this.#matrices.shift();
    const since = this.#matrices[0].pages;
    this.accesses = new Map();
    for (const [cell, pages] of this.#matrices.at(-1).pages) {
      this.accesses.set(cell, Math.max(0, pages - (since.get(cell) ?? 0)));
    }
  }

  #node({ node, allocated }, seconds) {
    const before = this.nodeRates.get(node) ?? { trend: new Trend(), recent: new Recent() };
    if (!allocated) {
      before.rates = null;
    } else {
      const since = (name) => {
        const was = before.totals?.[name];
        return seconds > 0 && was <= allocated[name] ? (allocated[name] - was) / seconds : 0;
      };
      const rates = { local: since("localBytes"), remote: since("remoteBytes") };
      before.totals = allocated;
      before.trend.add(this.at, rates.local, rates.remote, seconds);
      before.recent.add(this.at, rates, seconds);
      before.rates = before.recent.means(this.at);
    }
    this.nodeRates.set(node, before);
  }

  /** Takes in what the daemon remembers of the nodes, and of the workloads in short. */
  past(history, trends) {
    for (const { node, localBytesPerSecond, remoteBytesPerSecond } of history.recent.nodes) {
      const of = this.nodeRates.get(node) ?? { trend: new Trend(), recent: new Recent(), rates: null };
      const { endMillis: end, stepSeconds: step } = history.recent;
      of.trend.before(end, step, localBytesPerSecond, remoteBytesPerSecond);
      of.recent.before(end, step, { local: localBytesPerSecond.at(-1), remote: remoteBytesPerSecond.at(-1) });
      if (of.rates) of.rates = of.recent.means(this.at);
      this.nodeRates.set(node, of);
    }
    for (const { key, localBytesPerSecond, remoteBytesPerSecond } of trends.workloads) {
      const row = this.workloads.get(key);
      if (!row) continue;
      const { endMillis: end, stepSeconds: step } = trends;
      row.trend.before(end, step, localBytesPerSecond, remoteBytesPerSecond);
      row.recent.before(end, step, { local: localBytesPerSecond.at(-1), remote: remoteBytesPerSecond.at(-1) });
      row.rates = row.recent.means(this.at);
    }
    this.dropped = history.dropped;
    this.#kept = new Set(trends.workloads.map(({ key }) => key));
  }

  #take(key, fresh, seconds) {
    const before = this.workloads.get(key);
    const row = before ?? { key, history: [], allocation: null, trend: new Trend(), recent: new Recent(), missedAt: null, who: null };
    const totals = totalsOf(fresh);
    const since = (name) => {
      if (!before || !(seconds > 0) || totals[name] < before.totals[name]) return 0;
      return (totals[name] - before.totals[name]) / seconds;
    };
    const rates = { local: since("local"), remote: since("remote"), missed: since("missed") };
    if (rates.missed > 0) row.missedAt = this.at;
    row.totals = totals;
    row.workload = fresh;
    row.allocation = before?.allocation ?? null;
    this.#remember(row, rates, seconds);
    this.workloads.set(key, row);
  }

  /** A workload that is not in the sample did nothing since the last one. */
  #settle(row, seconds) {
    this.#remember(row, { local: 0, remote: 0, missed: 0 }, seconds);
  }

  #remember(row, rates, seconds) {
    row.recent.add(this.at, rates, seconds);
    row.rates = row.recent.means(this.at);
    if (seconds > 0) {
      const { local, remote } = row.totals.counted ? rates : { local: null, remote: null };
      row.history.push({ at: this.at, local, remote, resident: row.totals.resident });
      if (row.totals.counted) row.trend.add(this.at, local, remote, seconds);
    }
    if (row.history.length > HISTORY) row.history.shift();
    row.locality = locality(row);
  }

  /** Whether the kubelet gave the guarantee and not numaward: that is so if numaward can give none. */
  isForeign(row) {
    return this.#isAnswered && !this.areGuaranteesKnown && Boolean(row.totals.hasGuarantee);
  }

  /** The workloads on whose exclusive CPUs others ran of late, if it was not just asked who. */
  toAsk() {
    return [...this.workloads.values()].filter((row) => row.allocation && row.workload.intrudedCpus && !(this.at - row.who?.at < ASK));
  }

  /**
   * Takes in how long each task ran on the exclusive CPUs of a workload since they are counted, or null where that is not known. At
   * fault are those who ran for 0.1 % of the time since it was last asked, the longest first; at first only one who is alone.
   */
  ran(row, intruders) {
    const { micros: before, names: known } = row.who ?? { micros: null, names: [] };
    if (!intruders) {
      row.who = { at: this.at, micros: before, names: known };
      return;
    }
    const micros = new Map();
    for (const of of intruders.filter((of) => of.class !== "kernel_thread")) {
      const name = of.workload ?? of.command;
      micros.set(name, (micros.get(name) ?? 0) + of.micros);
    }
    // Less than 0.1 % of the time breaks no guarantee.
    const least = before ? this.at - row.who.at : 0;
    const since = [...micros].map(([name, all]) => ({ name, grown: all - (before?.get(name) ?? 0) })).filter(({ grown }) => grown > least);
    const names = since.sort((a, b) => b.grown - a.grown).map(({ name }) => name);
    row.who = { at: this.at, micros, names: names.length === 1 || (before && names.length > 0) ? names : known };
    row.verdict = verdictOf(row, this);
  }

  /** Notes that the request for the guarantees was answered. */
  answered() {
    this.#isAnswered = true;
    for (const row of this.workloads.values()) row.verdict = verdictOf(row, this);
  }

  /** Takes in the guarantees. */
  setAllocations(allocations) {
    this.allocations = allocations;
    this.areGuaranteesKnown = true;
    const byCgroup = new Map(allocations.allocations.map((allocation) => [allocation.cgroup, allocation]));
    for (const row of this.workloads.values()) {
      row.allocation = byCgroup.get(row.workload.cgroup) ?? null;
      row.locality = locality(row);
      row.verdict = verdictOf(row, this);
    }
  }

  /** Whether the daemon remembers more of a workload than was seen here. */
  isKept(row) {
    return this.#kept.has(row.key) || (this.dropped === 0 && row.history.length >= SOON);
  }

  /** The workload with this key, or with this name if there is one only. */
  find(asked) {
    if (this.workloads.has(asked)) return this.workloads.get(asked);
    const named = [...this.workloads.values()].filter((row) => row.workload.workload === asked);
    return named.length === 1 ? named[0] : named.find((row) => row.workload.cgroup) ?? null;
  }

  /** What an address calls a workload: its name, unless others have the same. */
  nameOf(row) {
    const name = row.workload.workload;
    return name.length <= LONGEST && this.find(name) === row ? name : row.key;
  }

  /** Takes in an event; `false` if it is known. */
  event(event) {
    if (this.events.some((known) => known.id === event.id)) return false;
    this.events.unshift(event);
    this.events.length = Math.min(this.events.length, 200);
    return true;
  }
}

/** What distinguishes workloads: the cgroup, or the name where there is none. */
export function keyOf(workload) {
  return workload.cgroup ?? workload.workload;
}

function pagesOf(accesses) {
  const pages = new Map();
  for (const from of accesses) {
    pages.set(`${from.node}>${from.node}`, from.localPages);
    for (const to of from.remote ?? []) pages.set(`${from.node}>${to.memoryNode ?? "unknown"}`, to.pages);
  }
  return pages;
}

/** Sums over nodes. What is not known is no zero: `resident` is null, and nothing is `counted`. Missed memory is known for workloads with a guarantee. */
function totalsOf(workload) {
  const totals = { local: 0, remote: 0, missed: 0, resident: null, byNode: [], counted: false, hasGuarantee: false };
  totals.hasGuarantee = (workload.residency ?? []).length > 0 || workload.nodes.some((node) => node.missedBytes !== undefined);
  for (const node of workload.nodes) {
    totals.local += node.allocated?.localBytes ?? 0;
    totals.remote += node.allocated?.remoteBytes ?? 0;
    totals.missed += node.missedBytes ?? 0;
    if (node.allocated) totals.counted = true;
    const hugepages = node.hugepages ?? [];
    for (const of of hugepages) {
      totals.local += of.allocated?.localBytes ?? 0;
      totals.remote += of.allocated?.remoteBytes ?? 0;
      totals.missed += of.missedBytes ?? 0;
    }
    const known = hugepages.filter((of) => of.residentBytes !== undefined);
    if (!node.resident && known.length === 0) continue;
    const base = node.resident ? node.resident.anonBytes + node.resident.fileBytes + node.resident.kernelBytes : 0;
    const lies = known.reduce((sum, of) => sum + of.residentBytes, base);
    totals.byNode.push({ node: node.node, bytes: lies });
    totals.resident = (totals.resident ?? 0) + lies;
  }
  return totals;
}

/**
 * How near a workload's memory is. With a guarantee: the share of its user memory that lies on its guaranteed nodes. Without one: the
 * share of its allocations that the CPU's own node served. Not known is NaN.
 */
function locality(row) {
  const residency = row.workload.residency ?? [];
  if (row.allocation?.nodes || residency.length > 0) {
    if (residency.length === 0) return { share: NaN, of: "guaranteed" };
    const sum = (place) => residency.reduce((sum, of) => sum + of[place].anonBytes + of[place].shmemBytes + of[place].fileBytes, 0);
    const [on, off] = [sum("on"), sum("off")];
    return { share: on + off > 0 ? on / (on + off) : 1, of: "guaranteed" };
  }
  const sum = row.totals.local + row.totals.remote;
  return { share: sum === 0 ? NaN : row.totals.local / sum, of: "allocated" };
}
