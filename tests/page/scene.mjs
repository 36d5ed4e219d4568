// A large host that looks like one at work, for the picture in the book: some guarantees are kept, one nearly is, one is broken.
// The tests of the page hold it against the API's document, as they do the plain one.

import { GIB, Host, large, numbers, residencyOf } from "./host.mjs";

const MIB = 2 ** 20;

/** Whose memory lies where in GiB, and how much of it they allocate there per second in MiB, the first node being that of their CPUs. */
const WORKLOADS = [
  ["payments/postgres-0/postgres", { 0: 22.4 }, { 0: 64 }],
  ["search/opensearch-2/opensearch", { 2: 18.6, 3: 17.9, 5: 0.31 }, { 2: 118, 3: 12 }],
  ["inference.service", { 4: 30.8, 5: 27.5 }, { 4: 310, 5: 45 }],
  ["payments/redis-0/redis", { 1: 6.2 }, { 1: 38 }],
  ["ingest/kafka-1/kafka", { 6: 14.2 }, { 6: 96 }],
  ["batch/spark-exec-7/executor", { 7: 9.1, 6: 6.4, 3: 3.2 }, { 7: 140, 6: 88, 3: 31 }],
  ["backup.service", { 1: 2.1, 0: 0.9 }, { 1: 42, 0: 21 }],
  ["web/gateway-5c9f/envoy", { 7: 1.4 }, { 7: 8.4 }],
  ["web/checkout-77d4/app", { 3: 2.6, 2: 0.7 }, { 3: 24, 2: 5.1 }],
  ["web/catalog-6b8c/app", { 2: 2.2 }, { 2: 17 }],
  ["monitoring/prometheus-0/prometheus", { 3: 5.3 }, { 3: 29 }],
  ["monitoring/vector-x2k4/vector", { 6: 0.4, 7: 0.1 }, { 6: 3.1, 7: 0.6 }],
  ["kube-system/coredns-8kqzp/coredns", { 7: 0.06 }, { 7: 0.9 }],
  ["containerd.service", { 0: 0.7, 1: 0.1 }, { 0: 2.2, 1: 0.3 }],
  ["kubelet.service", { 0: 0.12 }, { 0: 1.4 }],
  ["sshd.service", { 1: 0.02 }, { 1: 0.05 }],
].map(([workload, resident, rates], index) => {
  const isUnit = workload.endsWith(".service");
  return {
    workload,
    kind: isUnit ? "unit" : "container",
    cgroup: isUnit ? `/system.slice/${workload}` : `/kubepods.slice/${workload.replaceAll("/", "-")}.scope`,
    resident,
    rates: Object.entries(rates).map(([node, rate]) => ({ node: Number(node), rate })).sort((a, b) => b.rate - a.rate),
    phase: index * 1.7,
  };
});

/** Guarantees: by workload, its CPUs, its nodes and its memory in GiB. */
const GUARANTEES = [
  ["payments/postgres-0/postgres", "4-11,132-139", "0", 24],
  ["payments/redis-0/redis", "18-19,146-147", "1", 8],
  ["search/opensearch-2/opensearch", "32-39,48-55,160-167,176-183", "2-3", 40],
  ["inference.service", "64-75,80-91,192-203,208-219", "4-5", 64],
].map(([name, cpus, nodes, size]) => {
  const { cgroup } = WORKLOADS.find(({ workload }) => workload === name);
  return {
    name,
    target: name.endsWith(".service") ? { unit: name } : { cgroup },
    cgroup,
    directory: `/sys/fs/cgroup${cgroup}`,
    cpus,
    nodes,
    memory: [{ kind: "memory", nodes, bytes: size * GIB }],
    enforced: true,
    settings: { "cpuset.cpus": cpus, "cpuset.mems": nodes, "memory.min": String(size * GIB) },
    drift: name.startsWith("search/") ? [{ cgroup, knob: "cpuset.mems", wanted: nodes, found: "0-7", state: "waiting", count: 2 }] : [],
    explanation: { merges: [] },
  };
});

/** What has happened, so many seconds ago; the latest last. */
const EVENTS = [
  [9260, "home_moved", "info", "ingest/kafka-1/kafka", "The preferred node of ingest/kafka-1/kafka is now node 6, which has 12Gi of its memory; before, it was node 7."],
  [5410, "oom_kill", "warning", "batch/spark-exec-7/executor", "The OOM killer took \"java\" (48211): its cgroup reached memory.max."],
  [1835, "stall", "warning", "batch/spark-exec-7/executor", "\"java\" (51877) waited 1.4s for memory."],
  [940, "drift", "warning", "search/opensearch-2/opensearch", "cpuset.mems is 0-7 instead of 2-3; it will be written again. Written by: not known."],
  [312, "miss", "warning", "search/opensearch-2/opensearch", "\"java\" (30655) was given 4.00 KiB on node 5, outside its guaranteed nodes 2-3; there may have been more since."],
  [21, "intruder", "warning", "payments/redis-0/redis", "backup.service ran for 1.3s of the last 5s on CPU 18, exclusive to payments/redis-0/redis: \"restic\" (workload)."],
];

const PROBES = ["alloc", "hugepages", "hint", "scan", "migrate", "stall", "oom_kill", "switch"];

/** How much of its usual rate a workload has at a time, in seconds. */
function load(phase, seconds) {
  return 0.72 + 0.16 * Math.sin(seconds / 47 + phase) + 0.12 * Math.sin(seconds / 19 + 2.3 * phase);
}

class Scene extends Host {
  version = "0.1.0";
  /** It saw all that is listed in `EVENTS`. */
  uptime = 12_360_000;
  probes = PROBES.map((probe) => ({ probe, mode: "tp_btf" }));
  intruded = true;
  intrudedCpu = 18;
  intruders = [{ class: "workload", workload: "backup.service", command: "restic", micros: 41_300_000, runs: 9021 }];
  /** By workload: how much it has allocated since the page is open, in parts of its usual rate per second. */
  #sums = WORKLOADS.map(() => 0);

  tick() {
    const seconds = this.now() / 1000;
    this.#sums = this.#sums.map((sum, index) => sum + load(WORKLOADS[index].phase, seconds));
    super.tick();
  }

  workloads() {
    return WORKLOADS.map(({ workload, kind, cgroup, resident, rates }, index) => ({
      workload,
      kind,
      cgroup,
      counters: "own",
      nodes: this.nodes.map((node) => ({
        node,
        allocated: this.#allocated(node, (of) => of === index),
        ...(this.#hasGuarantee(workload) ? { missedBytes: this.#isGuaranteedOn(workload, node) ? 0 : Math.round((resident[node] ?? 0) * GIB) } : {}),
        resident: { anonBytes: Math.round((resident[node] ?? 0) * GIB), fileBytes: 0, kernelBytes: 0 },
      })),
      ...(this.#hasGuarantee(workload) ? { residency: [this.#residency(workload, resident)] } : {}),
      activity: { sampling: this.#hasGuarantee(workload) ? "skipped_cpuset" : "on", accesses: [{ node: rates[0].node, localPages: 4, remotePages: 0, remote: [] }] },
    }));
  }

  #residency(workload, resident) {
    const sum = (isOn) => Object.entries(resident).filter(([node]) => this.#isGuaranteedOn(workload, Number(node)) === isOn)
      .reduce((sum, [, size]) => sum + Math.round(size * GIB), 0);
    return residencyOf(sum(true), sum(false));
  }

  #hasGuarantee(workload) {
    return GUARANTEES.some(({ name }) => name === workload);
  }

  #isGuaranteedOn(workload, node) {
    return GUARANTEES.some(({ name, nodes }) => name === workload && numbers(nodes).includes(node));
  }

  /** What was allocated on a node; the first of a workload's nodes is that of its CPUs, as are those of its guarantee. */
  #allocated(node, isOf) {
    const of = (isLocal) => WORKLOADS.reduce((sum, { workload, rates }, index) => {
      const rate = rates.find((one) => one.node === node)?.rate ?? 0;
      const local = node === rates[0].node || this.#hasGuarantee(workload);
      return isOf(index) && local === isLocal ? sum + Math.round(rate * MIB * this.#sums[index]) : sum;
    }, 0);
    return { localBytes: of(true), remoteBytes: of(false), kernelBytes: 0 };
  }

  memoryOf(node) {
    const used = WORKLOADS.reduce((sum, { resident }) => sum + (resident[node] ?? 0), 2.4 + node / 5);
    return {
      memory: [
        { kind: "hugepages-2Mi", totalBytes: 4 * GIB, freeBytes: node === 4 || node === 5 ? 0.5 * GIB : 4 * GIB },
        { kind: "memory", totalBytes: 64 * GIB, freeBytes: Math.round((64 - used) * GIB) },
      ],
      allocated: this.#allocated(node, () => true),
    };
  }

  accessesOf(node) {
    const to = { 0: [1, 31], 2: [3, 96], 3: [2, 84], 4: [5, 130], 5: [4, 117], 6: [7, 24], 7: [6, 220] }[node];
    const remote = to ? [{ memoryNode: to[0], pages: this.turn * to[1] }] : [];
    if (node === 7) remote.push({ memoryNode: 3, pages: this.turn * 70 });
    return { node, localPages: this.turn * (410 + 60 * node), remotePages: remote.reduce((sum, { pages }) => sum + pages, 0), remote };
  }

  allocated() {
    return GUARANTEES;
  }

  /** Rates in the past: the mean of each step. */
  #past(count, step, rate) {
    const end = this.now() / 1000;
    return Array.from({ length: count }, (_, index) => Math.round(rate(end - (count - index - 0.5) * step)));
  }

  pastOf(node, count, step) {
    const rate = (isLocal) => (seconds) => WORKLOADS.reduce((sum, { workload, rates, phase }) => {
      const local = node === rates[0].node || this.#hasGuarantee(workload);
      return local === isLocal ? sum + (rates.find((one) => one.node === node)?.rate ?? 0) * MIB * load(phase, seconds) : sum;
    }, 0);
    return { localBytesPerSecond: this.#past(count, step, rate(true)), remoteBytesPerSecond: this.#past(count, step, rate(false)) };
  }

  trends() {
    return WORKLOADS.map(({ workload, cgroup, rates, phase }) => {
      const rate = (isLocal) => (seconds) => rates.reduce((sum, { rate }, index) => (
        (index === 0 || this.#hasGuarantee(workload)) === isLocal ? sum + rate * MIB * load(phase, seconds) : sum
      ), 0);
      return { key: cgroup, localBytesPerSecond: this.#past(60, 10, rate(true)), remoteBytesPerSecond: this.#past(60, 10, rate(false)) };
    });
  }
}

/** The host, to be started. */
export function scene() {
  const host = new Scene(WORKLOADS.length, (topology) => {
    large(topology);
    topology.isolatedCpus = "";
  });
  host.events = EVENTS.map(([ago, kind, severity, workload, message], index) => ({
    id: index + 1,
    time: new Date(Date.now() - ago * 1000).toISOString(),
    kind,
    severity,
    workload,
    message,
    suppressed: 0,
    details: {},
  }));
  return host;
}
