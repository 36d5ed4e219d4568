// A host that does not exist: serves the page's own files and the figures of as many workloads as asked for.
// What the daemon really serves is held against /metrics elsewhere; here the page itself is tested.

import { createServer } from "node:http";
import { readFile } from "node:fs/promises";

const FILES = new URL("../../userspace/http/page/", import.meta.url);
const TYPES = { html: "text/html; charset=utf-8", js: "text/javascript; charset=utf-8", css: "text/css; charset=utf-8", svg: "image/svg+xml" };
export const GIB = 2 ** 30;
/** The policy that the daemon sends; what it forbids must not be needed. */
export const POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/** A name that would break a page which builds markup from text. */
export const EVIL = `"><img src=x onerror=alert(1)>\n${"long".repeat(2560)}`;

const NODES = [0, 1, 2, 3];
/** A large machine: two sockets of 64 cores with two threads each, eight nodes, and a cache for each eight cores. */
export function large(topology) {
  const ids = [...Array(8).keys()];
  // As the kernel numbers them: the second threads after all the first ones.
  const range = (first, count) => `${first}-${first + count - 1},${first + 128}-${first + 127 + count}`;
  topology.nodes = ids.map((node) => ({
    ...topology.nodes[0],
    node,
    cpus: range(node * 16, 16),
    memoryOnly: false,
    distances: Object.fromEntries(ids.map((other) => [other, node === other ? 10 : node >> 2 === other >> 2 ? 12 : 32])),
  }));
  topology.sockets = [0, 1].map((socket) => ({ socket, cpus: range(socket * 64, 64), nodes: `${socket * 4}-${socket * 4 + 3}`, cores: 64 }));
  topology.lastLevelCaches = [...Array(16).keys()].map((cache) => ({ cpus: range(cache * 8, 8) }));
  topology.cores = [...Array(128).keys()].map((core) => ({ cpus: `${core},${core + 128}` }));
  topology.onlineCpus = topology.possibleCpus = "0-255";
}

function topology() {
  const cpus = (node) => `${node * 8}-${node * 8 + 7}`;
  return {
    nodes: NODES.map((node) => ({
      node,
      cpus: node === 3 ? "" : cpus(node),
      memoryBytes: 64 * GIB,
      hugepages: [{ size: "2Mi", sizeBytes: 2097152, totalPages: 512, freePages: 512, surplusPages: 0 }],
      distances: Object.fromEntries(NODES.map((other) => [other, node === other ? 10 : 21])),
      memoryOnly: node === 3,
    })),
    sockets: [{ socket: 0, cpus: "0-15", nodes: "0-1", cores: 16 }, { socket: 1, cpus: "16-23", nodes: "2", cores: 8 }],
    lastLevelCaches: [{ cpus: "0-1,4-5" }, { cpus: "2-3,6-7" }],
    cores: [0, 1, 2, 3].map((core) => ({ cpus: `${core},${core + 4}` })),
    onlineCpus: "0-23",
    possibleCpus: "0-23",
    isolatedCpus: "7",
    memoryBlockSizeBytes: 134217728,
  };
}

const NOTHING = { localBytesPerSecond: [null], remoteBytesPerSecond: [null], missedBytesPerSecond: [null], residentBytes: [null] };

/** The numbers of a list of the kernel, such as "0-3,8". */
export function numbers(list) {
  return list.split(",").flatMap((part) => {
    const [first, last = first] = part.split("-").map(Number);
    return Array.from({ length: last - first + 1 }, (_, index) => first + index);
  });
}

/** Anonymous memory on and off the guaranteed nodes, with the daemon's verdict. */
export function residencyOf(on, off) {
  const anon = (anonBytes) => ({ anonBytes, shmemBytes: 0, fileBytes: 0 });
  return { kind: "memory", on: anon(on), off: anon(off), broken: off > Math.max(16 * 2 ** 20, (on + off) / 100) };
}

/** Rates that go up and down. */
function wave(count, most) {
  return Array.from({ length: count }, (_, index) => Math.round((most * (1 + Math.sin(index / 4))) / 2));
}

const ALLOCATION = {
  name: "database",
  target: { unit: "database.service" },
  cgroup: "/system.slice/database.service",
  directory: "/sys/fs/cgroup/system.slice/database.service",
  cpus: "2-5",
  nodes: "0",
  memory: [{ kind: "memory", nodes: "0", bytes: 8 * GIB }],
  enforced: true,
  settings: { "cpuset.cpus": "2-5", "cpuset.mems": "0", "memory.min": String(8 * GIB) },
  drift: [
    { cgroup: "/system.slice/database.service", knob: "cpuset.mems", wanted: "0", found: "0-3", state: "left", count: 11, noticed: "write" },
    { cgroup: "/system.slice", knob: "cpuset.cpus", wanted: "0-23", found: "0-1", state: "left", count: 11, noticed: "write" },
  ],
  explanation: {
    merges: [{
      hints: [{ resource: "cpu", sets: [{ nodes: "0", preferred: true }, { nodes: "0-1", preferred: false }] }, { resource: "memory" }],
      candidates: [{ nodes: "0", preferred: true, verdict: "best" }],
      nodes: "0",
      accepted: true,
    }],
  },
};

export class Host {
  #streams = new Set();
  turn = 0;
  /** How long the daemon has run when the page is opened, in milliseconds. */
  uptime = 1_200_000;
  requests = [];
  events = [];
  version = "0.0.0";
  probes = [
    { probe: "alloc", mode: "tp_btf" },
    { probe: "hint", mode: "absent", reason: `no BTF: ${EVIL.slice(0, 40)}` },
    { probe: "hardware", mode: "absent", reason: "switched off by probes.hardware.enabled" },
  ];
  sharedCpus = "0-1,6-23";
  /** Whether tasks of others run on this exclusive CPU. */
  intruded = false;
  intrudedCpu = 3;
  #intrusion = 0;
  /** Call chains; none where they are off. */
  stacks = null;
  /** The other tasks. */
  intruders = [{ class: "host", command: EVIL.slice(0, 15), micros: 1_234_567, runs: 3 }];
  /** The memory that is guaranteed to the database, in bytes. */
  guaranteed = 8 * GIB;
  /** The CPUs that are guaranteed to it. */
  guaranteedCpus = "2-5";
  /** Pages of the database on a node outside its guarantee, in bytes: missed, and still there. */
  missed = 0;
  /** How many processes of the database were killed because memory ran out. */
  oomKills = 0;
  /** How much memory the database has on its own node, in bytes; by default the most of all. */
  resident = undefined;
  /** Whether its knobs hold what was written. */
  drifts = true;
  /** Guaranteed to the database but missing, as in the API. */
  missing = undefined;
  /** Whether the kubelet gives the guarantees, and numaward only watches. */
  observes = false;
  /** Settings that could not be given back yet. */
  pending = [];
  /** Whether it does not answer requests for the guarantees. */
  silent = false;

  now() {
    return this.uptime + this.turn * 1000;
  }

  constructor(count, change = () => {}) {
    this.count = count;
    this.topology = topology();
    change(this.topology);
    this.nodes = this.topology.nodes.map(({ node }) => node);
  }

  async start() {
    this.server = createServer((request, response) => this.#serve(request, response));
    await new Promise((resolve) => this.server.listen(0, "127.0.0.1", resolve));
    this.url = `http://127.0.0.1:${this.server.address().port}/`;
    return this;
  }

  async stop() {
    for (const stream of this.#streams) stream.destroy();
    this.server.closeAllConnections();
    await new Promise((resolve) => this.server.close(resolve));
  }

  /** Everybody who watches gets the next sample; `changed` workloads differ from the one before. */
  tick(changed = this.count) {
    this.turn += 1;
    if (this.intruded) this.#intrusion += 20_000;
    const sample = this.#sample(false, this.workloads().slice(0, changed));
    for (const stream of this.#streams) stream.write(`event: sample\ndata: ${JSON.stringify(sample)}\n\n`);
  }

  /** A complete sample. */
  sample() {
    return this.#sample(true, this.workloads());
  }

  report(event) {
    this.events.push(event);
    for (const stream of this.#streams) stream.write(`id: ${event.id}\ndata: ${JSON.stringify(event)}\n\n`);
  }

  /** Cuts all streams, as a daemon that restarts does. */
  cut() {
    for (const stream of this.#streams) stream.destroy();
  }

  /** Begins anew, and has missed nothing. */
  restart() {
    this.turn = 0;
    this.missed = 0;
    this.cut();
  }

  workloads() {
    const named = [
      { workload: "database", kind: "unit", cgroup: "/system.slice/database.service", home: 0 },
      { workload: EVIL, kind: "container", cgroup: "/evil", home: 1 },
      // Of which nothing is known.
      { workload: "unknown", kind: "cgroup", cgroup: "/unknown", home: null },
    ];
    for (let index = named.length; index < this.count; index += 1) {
      named.push({ workload: `worker-${index}`, kind: "unit", cgroup: `/work.slice/worker-${index}.service`, home: index % this.nodes.length });
    }
    return named.map((row, index) => ({
      workload: row.workload,
      kind: row.kind,
      cgroup: row.cgroup,
      counters: row.home === null ? "none" : "own",
      ...(index === 0 && this.oomKills > 0 ? { oomKills: this.oomKills } : {}),
      nodes: row.home === null ? this.nodes.map((node) => ({ node })) : this.nodes.map((node) => ({
        node,
        allocated: {
          localBytes: node === row.home ? this.turn * 4096 * (index + 1) : 0,
          remoteBytes: node === row.home ? 0 : this.turn * 1024 * (index % 7),
          kernelBytes: 4096,
        },
        ...(index === 0 ? { missedBytes: node === 1 ? this.missed : 0 } : {}),
        resident: { anonBytes: node === row.home ? (index === 0 && this.resident) || (this.count - index) * 1048576 : index === 0 && node === 1 ? this.missed : 0, fileBytes: 0, kernelBytes: 0 },
        cpuMicros: node === row.home ? this.turn * 250_000 : 0,
      })),
      ...(index === 0 ? { residency: [residencyOf(this.resident || this.count * 1048576, this.missed)] } : {}),
      activity: {
        sampling: index === 0 ? "skipped_cpuset" : "on",
        accesses: [{ node: row.home, localPages: 4, remotePages: 7, remote: [{ memoryNode: 1, pages: 5 }, { pages: 2 }] }],
      },
    }));
  }

  #sample(full, workloads) {
    const cpusOf = (name) => this.allocated().filter((of) => of.name === name).flatMap(({ cpus }) => numbers(cpus));
    const isIntruded = (row) => this.intruded && cpusOf(row.workload).includes(this.intrudedCpu);
    return {
      atMillis: this.now(),
      full,
      promises: 1,
      nodes: this.topology.nodes.map(({ node, cpus }) => ({ node, cpus, ...this.memoryOf(node) })),
      accesses: this.nodes.filter((node) => node !== 3 || this.nodes.length > 4).map((node) => this.accessesOf(node)),
      exclusiveCpus: this.allocated().flatMap(({ name, cpus }) => numbers(cpus).map((cpu) => ({
        cpu,
        workload: name,
        ownMicros: this.turn * 900_000,
        kernelThreadMicros: this.turn,
        hostMicros: cpu === this.intrudedCpu ? this.#intrusion : 0,
        workloadMicros: 0,
        hardInterrupts: 250,
      }))),
      workloads: workloads.map((row) => (isIntruded(row) ? { ...row, intrudedCpus: `${this.intrudedCpu}` } : row)),
      removed: [],
    };
  }

  /** The memory of a node. */
  memoryOf(node) {
    return {
      memory: [
        { kind: "hugepages-2Mi", totalBytes: GIB, freeBytes: node === 0 ? GIB / 4 : GIB },
        { kind: "memory", totalBytes: 64 * GIB, freeBytes: 32 * GIB },
      ],
      allocated: { localBytes: this.turn * 30_000_000 * (node + 1), remoteBytes: this.turn * 9_000_000 * (node % 3), kernelBytes: 0 },
    };
  }

  /** Which memory the CPUs of a node were seen to use. */
  accessesOf(node) {
    return {
      node,
      localPages: this.turn * 100,
      remotePages: this.turn * 10,
      remote: node === 0 ? [{ memoryNode: 2, pages: 1000 + this.turn * 10 }, ...(this.moved ? [{ pages: this.moved }] : [])] : [],
    };
  }

  /** The guarantees. */
  allocated() {
    return [{
      ...ALLOCATION,
      cpus: this.guaranteedCpus,
      memory: [{ kind: "memory", nodes: "0", bytes: this.guaranteed }],
      drift: this.drifts ? ALLOCATION.drift : [],
      missing: this.missing,
    }];
  }

  /** Rates of a node that were, in steps of so many seconds. */
  pastOf(node, count) {
    return { localBytesPerSecond: wave(count, 30_000_000 * (node + 1)), remoteBytesPerSecond: wave(count, 9_000_000 * (node % 3)) };
  }

  /** Those of workloads, in steps of ten seconds. */
  trends() {
    return this.workloads().slice(0, 40).map((row, index) => ({
      key: row.cgroup,
      localBytesPerSecond: wave(60, (index + 1) * 400_000),
      remoteBytesPerSecond: wave(60, (index % 4) * 300_000),
    }));
  }

  #history() {
    const series = (stepSeconds, count) => ({
      stepSeconds,
      endMillis: this.now(),
      nodes: this.nodes.map((node) => ({
        node,
        ...this.pastOf(node, count, stepSeconds),
        freeBytes: Array(count).fill(32 * GIB),
      })),
      missedBytesPerSecond: Array(count).fill(0),
    });
    return { kept: this.count, dropped: 0, recent: series(5, 120), hour: series(60, 20) };
  }

  async #serve(request, response) {
    const url = new URL(request.url, this.url);
    this.requests.push(url.pathname);
    const path = decodeURIComponent(url.pathname);
    const json = (value) => {
      response.writeHead(200, { "content-type": "application/json" });
      response.end(JSON.stringify(value));
    };
    switch (path) {
      case "/api/v1/topology":
        return json(this.topology);
      case "/api/v1/version":
        return json({ version: this.version, kernel: "6.12", architecture: "x86_64" });
      case "/api/v1/status":
        return json({
          host: "rack7-node12",
          version: this.version,
          probes: this.probes,
          headroom: [],
          degraded: [],
        });
      case "/api/v1/history":
        return json(this.#history());
      case "/api/v1/history/workloads":
        return json({ stepSeconds: 10, endMillis: this.now(), workloads: this.trends() });
      case "/api/v1/workloads//evil/history":
      case "/api/v1/workloads//unknown/history":
        return json({ recent: { stepSeconds: 5, endMillis: this.now(), ...NOTHING }, hour: { stepSeconds: 60, endMillis: this.now(), ...NOTHING } });
      case "/api/v1/workloads//system.slice/database.service/history": {
        const series = (stepSeconds, count) => ({
          stepSeconds,
          endMillis: this.now(),
          localBytesPerSecond: wave(count, 60_000_000),
          remoteBytesPerSecond: wave(count, 7_000_000).map((value, index) => (index > 40 && index < 50 ? null : value)),
          missedBytesPerSecond: Array(count).fill(0),
          residentBytes: Array.from({ length: count }, (_, index) => (3 + index / count) * GIB),
        });
        return json({ recent: series(5, 120), hour: series(60, 20) });
      }
      case "/api/v1/allocations": {
        if (this.silent) return undefined;
        if (this.observes) {
          response.writeHead(503, { "content-type": "application/problem+json" });
          return response.end(JSON.stringify({ detail: "nothing can be guaranteed here: mode is observe" }));
        }
        const allocations = this.allocated();
        const guaranteed = (node) => allocations.flatMap(({ memory }) => memory).filter(({ kind, nodes }) => kind === "memory" && numbers(nodes).includes(node))
          .reduce((sum, { nodes, bytes }) => sum + bytes / numbers(nodes).length, 0);
        return json({
          allocations,
          sharedCpus: this.sharedCpus,
          enforcement: { mode: "on", herding: { mode: "off", cgroups: [] }, pendingRestores: this.pending },
          nodes: this.nodes.map((node) => ({
            node,
            freeCpus: "",
            memory: [{ kind: "memory", totalBytes: 64 * GIB, reservedBytes: GIB, allocatableBytes: 63 * GIB, promisedBytes: guaranteed(node), freeBytes: 63 * GIB - guaranteed(node) }],
          })),
        });
      }
      case "/api/v1/events":
        return json({ events: this.events.filter((event) => !url.searchParams.has("workload") || event.workload === url.searchParams.get("workload")) });
      case "/api/v1/stream": {
        response.writeHead(200, { "content-type": "text/event-stream" });
        response.write(`event: sample\ndata: ${JSON.stringify(this.sample())}\n\n`);
        this.#streams.add(response);
        response.on("close", () => this.#streams.delete(response));
        return undefined;
      }
      default:
        if (/^\/api\/v1\/workloads\/.*\/intruders$/.test(path)) return json({ watching: true, cpus: [], intruders: this.intruders });
        if (/^\/api\/v1\/workloads\/.*\/stacks$/.test(path)) return this.stacks ? json(this.stacks) : this.#off(response);
        return this.#file(url.pathname, response);
    }
  }

  #off(response) {
    response.writeHead(409, { "content-type": "application/problem+json" });
    return response.end(JSON.stringify({ detail: "call chains are not taken: set observe.callChains.enabled" }));
  }

  async #file(path, response) {
    const name = path === "/" ? "index.html" : /^\/page\/([a-z]+\.[a-z]+)$/.exec(path)?.[1];
    const content = name && (await readFile(new URL(name, FILES)).catch(() => null));
    if (!content) {
      response.writeHead(404);
      return response.end();
    }
    response.writeHead(200, { "content-type": TYPES[name.split(".").pop()], "content-security-policy": POLICY });
    return response.end(content);
  }
}
