// What the page knows: the last sample, rates between samples, and a short history of each workload.
//
// Samples come once a second over the stream: the first is complete, the later ones hold what changed. Counters
// only grow; one that went back belongs to another workload, and its rate is not known for one sample.
// Accesses between nodes and intruders are those of the last minute.

/** Samples of a workload that are kept: five minutes. */
const HISTORY = 300;
/** For how long accesses and intruders count as recent, in milliseconds. */
const RECENT = 60_000;
/** The share of the time from which on others on an exclusive CPU are shown. */
const INTRUDED = 0.001;

export class State {
  topology = null;
  version = null;
  nodes = [];
  workloads = new Map();
  allocations = { allocations: [], nodes: [], sharedCpus: "" };
  events = [];
  /** Pages used in the last minute, by "CPU's node>memory's node"; null where nothing is sampled. */
  accesses = null;
  exclusiveCpus = [];
  /** The exclusive CPUs on which others ran within the last minute. */
  intruded = new Set();
  /** Counts of accesses, from the last minute's begin on. */
  #matrices = [];
  /** By exclusive CPU: its owner, how long others ran there, and when they were seen last. */
  #others = new Map();
  /** When the last sample was taken, in milliseconds of the daemon's clock. */
  at = null;
  revision = null;

  /** Takes in a sample; says whether allocations have to be fetched anew. */
  sample(sample) {
    const seconds = this.at === null ? null : (sample.atMillis - this.at) / 1000;
    this.at = sample.atMillis;
    this.nodes = sample.nodes;
    this.#sampled(sample);
    this.#intruders(sample, seconds);
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
      for (const [key, row] of this.workloads) if (!changed.has(key)) this.#settle(row);
    }
    const stale = this.revision !== sample.promises;
    this.revision = sample.promises;
    return stale;
  }

  #sampled({ atMillis: at, accesses }) {
    const before = this.#matrices.at(-1);
    // Without counts, or with those of another daemon, it begins anew.
    if (!accesses || before?.at > at) this.#matrices = [];
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

  #intruders({ atMillis: at, exclusiveCpus = [] }, elapsed) {
    this.exclusiveCpus = exclusiveCpus;
    const others = new Map();
    for (const cpu of exclusiveCpus) {
      const micros = cpu.hostMicros + cpu.workloadMicros;
      const before = this.#others.get(cpu.cpu);
      const known = before?.owner === cpu.workload;
      const ran = known && elapsed > 0 && micros - before.micros > elapsed * 1e6 * INTRUDED;
      others.set(cpu.cpu, { owner: cpu.workload, micros, seen: ran ? at : (known ? before.seen : -Infinity) });
    }
    this.#others = others;
    this.intruded = new Set([...others].filter(([, { seen }]) => at - seen < RECENT).map(([cpu]) => cpu));
  }

  #take(key, fresh, seconds) {
    const before = this.workloads.get(key);
    const row = before ?? { key, history: [], allocation: null };
    const totals = totalsOf(fresh);
    const since = (name) => {
      if (!before || !(seconds > 0) || totals[name] < before.totals[name]) return 0;
      return (totals[name] - before.totals[name]) / seconds;
    };
    row.rates = { local: since("local"), remote: since("remote"), missed: since("missed") };
    row.totals = totals;
    row.workload = fresh;
    row.allocation = before?.allocation ?? null;
    this.#remember(row);
    this.workloads.set(key, row);
  }

  /** A workload that is not in the sample did nothing since the last one. */
  #settle(row) {
    row.rates = { local: 0, remote: 0, missed: 0 };
    this.#remember(row);
  }

  #remember(row) {
    row.history.push({ at: this.at, local: row.rates.local, remote: row.rates.remote, resident: row.totals.resident });
    if (row.history.length > HISTORY) row.history.shift();
    row.locality = locality(row);
  }

  /** Takes in what is promised. */
  promise(allocations) {
    this.allocations = allocations;
    const byCgroup = new Map(allocations.allocations.map((allocation) => [allocation.cgroup, allocation]));
    for (const row of this.workloads.values()) {
      row.allocation = byCgroup.get(row.workload.cgroup) ?? null;
      row.locality = locality(row);
    }
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

/** Sums over nodes. What is not known is no zero: `resident` is null, and nothing is `counted`. */
function totalsOf(workload) {
  const totals = { local: 0, remote: 0, missed: 0, resident: null, byNode: [], counted: false };
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
 * How near a workload's memory is. With a guarantee: the share that lies on the promised nodes. Without one: the
 * share of its allocations that the CPU's own node served.
 */
function locality(row) {
  if (row.allocation?.nodes) {
    if (row.totals.resident === null) return { share: NaN, of: "promised", level: null };
    const promised = new Set(row.allocation.nodeNumbers);
    const inside = row.totals.byNode.filter(({ node }) => promised.has(node));
    const bytes = inside.reduce((sum, { bytes }) => sum + bytes, 0);
    const share = row.totals.resident > 0 ? bytes / row.totals.resident : 1;
    return { share, of: "promised", level: level(share, 0.999, 0.95) };
  }
  const sum = row.totals.local + row.totals.remote;
  if (sum === 0) return { share: NaN, of: "allocated", level: null };
  const share = row.totals.local / sum;
  return { share, of: "allocated", level: level(share, 0.9, 0.5) };
}

function level(share, good, warn) {
  if (share >= good) return "good";
  return share >= warn ? "warn" : "bad";
}
