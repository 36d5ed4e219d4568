// A workload in full: whether its guarantee holds and why it was placed there, then its past, then what it holds. And how
// the daemon itself is doing.

import { chart } from "./chart.js";
import { eventItem } from "./events.js";
import { code } from "./stacks.js";
import { fetchJson } from "./stream.js";
import { bytes, counted, element, guarantee, knobValue, list, nodes, percent, rate, seconds } from "./format.js";
import { isOff } from "./verdict.js";
import { verdictChip } from "./workloads.js";

/** So many of those who ran on exclusive CPUs are named. */
const INTRUDERS = 8;
/** How often the past is fetched anew while it is shown, in milliseconds. */
const REFRESH = 60_000;
/** The spans of the charts, in milliseconds. */
const SPANS = { "10 min": 600_000, "1 h": 3_600_000 };

export class DetailView {
  #key = null;
  #span = "10 min";
  #past = null;
  #fetched = 0;

  /** `closed` is called when the user closes it. */
  constructor({ dialog, title, body, close, closed }) {
    Object.assign(this, { dialog, title, body });
    close.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      // The event comes late: another workload may be open by now.
      if (dialog.open) return;
      this.#key = null;
      closed();
    });
  }

  close() {
    if (this.dialog.open) this.dialog.close();
  }

  /** Whether this workload is shown. */
  shows(key) {
    return this.dialog.open && this.#key === key;
  }

  async open(state, key) {
    const row = state.workloads.get(key);
    if (!row) return;
    this.#key = key;
    [this.#past, this.#fetched] = [null, 0];
    this.title.textContent = row.workload.workload;
    this.head = element("div", { class: "answer" });
    this.why = element("div");
    this.charts = element("div");
    this.live = element("div", { class: "tables" });
    this.rest = element("div", { class: "tables" });
    this.body.replaceChildren(this.head, this.why, element("section", { class: "past", "aria-label": "Past" }, this.#spans(state), this.charts), this.live, code(row.workload.workload), this.rest);
    if (!this.dialog.open) this.dialog.showModal();
    this.body.scrollTop = 0;
    this.update(state);
    const name = encodeURIComponent(row.workload.workload);
    const [page, intruders] = await Promise.all([
      fetchJson(`api/v1/events?workload=${name}`).catch(() => null),
      row.allocation?.cpus ? fetchJson(`api/v1/workloads/${name}/intruders`).catch(() => null) : null,
    ]);
    if (this.#key !== key) return;
    this.why.replaceChildren(...decision(row.allocation?.explanation));
    this.rest.replaceChildren(...this.#rest(row, page?.events ?? [], intruders));
  }

  /** How the daemon is doing: its probes, and what does not work. */
  showStatus(state) {
    this.#key = null;
    this.title.textContent = "How numaward is doing";
    this.body.replaceChildren(...statusOf(state));
    if (!this.dialog.open) this.dialog.showModal();
  }

  #spans(state) {
    return element("fieldset", { class: "switch" }, element("legend", {}, "Allocation and memory"), Object.keys(SPANS).map((span) => {
      const input = element("input", { type: "radio", name: "span", value: span, checked: span === this.#span });
      input.addEventListener("change", () => {
        this.#span = span;
        this.update(state);
      });
      return element("label", {}, input, ` ${span}`);
    }));
  }

  /** Shows the latest figures while it is open. */
  update(state) {
    const row = this.#key === null ? null : state.workloads.get(this.#key);
    if (!row) {
      if (this.#key !== null) this.live.replaceChildren(element("p", { class: "notice" }, "This workload is gone."));
      return;
    }
    if (Date.now() - this.#fetched > REFRESH && state.isKept(row)) this.#fetch(state, this.#key);
    const cpus = state.exclusiveCpus.filter((cpu) => cpu.workload === row.workload.workload);
    this.head.replaceChildren(...answer(row));
    this.charts.replaceChildren(...this.#charts(row, state));
    this.live.replaceChildren(byNode(row), ...accesses(row.workload.activity), ...hugepages(row), ...exclusiveCpus(cpus));
  }

  async #fetch(state, key) {
    this.#fetched = Date.now();
    const past = await fetchJson(`api/v1/workloads/${encodeURIComponent(key)}/history`).catch(() => null);
    if (this.#key !== key || !past) return;
    this.#past = past;
    this.update(state);
  }

  #charts(row, state) {
    const span = SPANS[this.#span];
    const [to, from] = [state.at, state.at - span];
    const clock = (at) => new Date(Date.now() - (state.at - at)).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
    const width = Math.max(320, Math.round(this.charts.clientWidth / (this.charts.clientWidth > 900 ? 2 : 1)) - 12);
    const shared = { from, to, clock, width };
    const points = (past, live) => this.#points(row, past, live, span, state.at).filter(({ at }) => at >= from);
    const line = (name, label, past, live) => ({ name, label, points: points(past, live), gap: span > 600_000 ? 150_000 : 12_000 });
    return [
      chart({ ...shared, title: "Allocated", format: rate, series: [
        line("local", "local", "localBytesPerSecond", "local"), line("remote", "remote", "remoteBytesPerSecond", "remote"),
      ] }),
      chart({ ...shared, title: "Memory", format: bytes, series: [line("resident", "resident", "residentBytes", "resident")] }),
    ];
  }

  /** What the daemon remembers, coarse to fine, then what was seen here since. */
  #points(row, field, live, span, now) {
    const points = (series) => series[field].map((value, index, { length }) => (
      { at: series.endMillis - (length - 1 - index) * series.stepSeconds * 1000, value }
    ));
    const made = this.#past ? points(this.#past.recent) : [];
    if (this.#past && span > SPANS["10 min"]) {
      const finer = made[0]?.at ?? Infinity;
      made.unshift(...points(this.#past.hour).filter(({ at }) => at < finer));
    }
    const end = made.at(-1)?.at ?? -Infinity;
    // Means over the same time as those before, so that the line does not change its nature.
    const step = 5000;
    let open = null;
    for (const point of row.history.filter(({ at }) => at > end)) {
      const bucket = Math.floor(point.at / step);
      if (open?.bucket !== bucket) {
        open = { bucket, at: point.at, sum: 0, count: 0, last: null };
        made.push(open);
      }
      if (point[live] === null) continue;
      Object.assign(open, { at: point.at, sum: open.sum + point[live], count: open.count + 1, last: point[live] });
    }
    const isRate = live !== "resident";
    const shown = made.map((point) => {
      if (point.bucket === undefined) return point;
      const mean = point.count > 0 ? point.sum / point.count : null;
      return { at: point.at, value: isRate ? mean : point.last };
    });
    // The line ends with the figure that is shown above it, instead of a step that is not over.
    if (isRate && row.totals.counted && !Number.isNaN(row.rates[live])) {
      while (shown.at(-1)?.at >= now) shown.pop();
      shown.push({ at: now, value: row.rates[live] });
    }
    return shown;
  }

  #rest(row, events, intruders) {
    const parts = otherTasks(intruders);
    if (row.allocation) parts.push(guaranteeTable(row.allocation), settings(row.allocation));
    parts.push(element("h3", {}, "What happened"));
    parts.push(events.length > 0
      ? element("ol", { class: "happened" }, events.reverse().map(eventItem))
      : element("p", { class: "quiet" }, "Nothing that is still remembered."));
    return parts;
  }
}

function table(caption, head, rows) {
  return element(
    "table",
    { class: head.length > 5 ? "wide" : null },
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, head.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, rows.map((cells) => element("tr", {}, cells.map((cell, index) => (
      index === 0 ? element("th", { scope: "row" }, cell) : element("td", {}, cell)
    ))))),
  );
}

/** The verdict on its guarantee, the reasons for it, and the guarantee. */
function answer(row) {
  const { workload, rates, totals, locality, allocation, verdict } = row;
  const chip = element("span", { class: "chip large" });
  verdictChip(chip, row);
  const words = locality.of === "guaranteed" ? "of its user memory lies on its guaranteed nodes" : "of its allocations were local";
  const said = [
    `${bytes(totals.resident ?? NaN)} resident; ${percent(locality.share)} ${words}.`,
    totals.counted ? `Now ${rate(rates.local)} local and ${rate(rates.remote)} remote.` : "What it allocates is not counted.",
  ];
  if (totals.missed > 0) said.push(`${bytes(totals.missed)} were missed since it is counted.`);
  if (workload.oomKills) said.push(`${killed(workload.oomKills)} because memory ran out.`);
  const given = allocation ? guarantee(allocation) : verdict.isForeign ? "guaranteed by the kubelet" : "no guarantee";
  return [
    element("p", { class: "guarantee" }, chip, element("b", {}, given), allocation?.cpus ? element("span", { class: "quiet" }, `CPUs ${allocation.cpus}`) : null),
    ...verdict.reasons.map((reason) => element("p", { class: "reason", "data-level": verdict.level }, reason)),
    element("p", {}, said.join(" ")),
    element("p", { class: "quiet" }, `${workload.kind}${workload.cgroup ? `, cgroup ${workload.cgroup}` : ""}${allocation || totals.hasGuarantee ? "" : ". It has no guarantee: pages on other nodes are remote, not missed."}`),
  ];
}

function killed(count) {
  return count === 1 ? "One of its processes was killed" : `${count} of its processes were killed`;
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
  return table("Memory and CPU time by node", ["node", "resident", "allocated local", "allocated remote", "missed", "CPU time"], row.workload.nodes.map((node) => [
    String(node.node),
    bytes(row.totals.byNode.find((part) => part.node === node.node)?.bytes ?? NaN),
    bytes(node.allocated?.localBytes ?? NaN),
    bytes(node.allocated?.remoteBytes ?? NaN),
    node.missedBytes === undefined ? "–" : bytes(node.missedBytes),
    node.cpuMicros === undefined ? "–" : seconds(node.cpuMicros),
  ]));
}

/** Why silence is no good news. */
const SAMPLING = {
  on: "The kernel scans its memory: a page counts about once per scan, however often it is used.",
  off: "The kernel does not scan its memory: NUMA balancing is off, or there is one node.",
  mode2: "The kernel does not scan its memory: NUMA balancing serves tiering of memory only.",
  skipped_cpuset: "The kernel does not scan its memory, because it may use one node only.",
  bound: "The kernel hardly scans its memory, because of its memory policy.",
  unknown: "Whether the kernel scans its memory is not known yet.",
};

function accesses(activity) {
  if (!activity?.sampling) return [];
  const estimate = activity.estimatedRemotePercent;
  const guess = estimate === undefined ? "" : ` By where its threads ran and its memory lies, an estimated ${estimate} % of its accesses are remote.`;
  const said = element("p", {}, (SAMPLING[activity.sampling] ?? activity.sampling) + guess);
  const seen = (activity.accesses ?? []).filter((of) => of.localPages > 0 || of.remotePages > 0);
  if (seen.length === 0) return [element("div", {}, said)];
  const places = (of) => (of.remote ?? []).map(({ memoryNode, pages }) => (
    memoryNode === undefined ? `${pages} moved at once` : `node ${memoryNode}: ${pages}`
  ));
  return [element("div", {}, table("Pages touched, by scan", ["from CPUs of", "local", "remote", "nodes of remote pages"], seen.map((of) => [
    `node ${of.node}`, String(of.localPages), String(of.remotePages), places(of).join(", "),
  ])), said)];
}

function exclusiveCpus(cpus) {
  if (cpus.length === 0) return [];
  const head = ["CPU", "its own", "kernel threads", "host", "other workloads", "interrupts", "softirqs"];
  return [table("Time on its exclusive CPUs", head, cpus.map((cpu) => [
    String(cpu.cpu),
    ...[cpu.ownMicros, cpu.kernelThreadMicros, cpu.hostMicros, cpu.workloadMicros].map(seconds),
    String(cpu.hardInterrupts ?? "–"),
    String(cpu.softInterrupts ?? "–"),
  ]))];
}

function otherTasks(intruders) {
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
  return [table("Other tasks on its exclusive CPUs", ["command", "workload or kind", "time", "runs"], rows)];
}

function guaranteeTable(allocation) {
  return table("Guaranteed", ["kind", "nodes", "amount"], [
    ["cpu", allocation.nodes, allocation.cpus ? `${counted(list(allocation.cpus).length, "CPU")}: ${allocation.cpus}` : "shared"],
    ...allocation.memory.map((block) => [block.kind, block.nodes, bytes(block.bytes)]),
  ]);
}

/** What became of a knob that did not hold what was written. */
const DRIFTED = {
  repaired: (drift) => `the same; was ${drift.found ?? "gone"}, ${drift.count} times`,
  waiting: (drift) => `${drift.found ?? "gone"}; will be written again`,
  left: (drift) => `${drift.found ?? "gone"}; left: another program keeps writing it`,
  ineffective: (drift) => `the same, of which the kernel gives ${drift.found ?? "nothing"}`,
};

function settings(allocation) {
  const own = allocation.drift.filter((drift) => drift.cgroup === allocation.cgroup);
  const drifted = new Map(own.map((drift) => [drift.knob, { ...drift, found: drift.found && knobValue(drift.knob, drift.found) }]));
  return table("Enforced", ["knob", "wanted", "found"], Object.entries(allocation.settings).map(([knob, value]) => {
    const drift = drifted.get(knob);
    return [knob, knobValue(knob, value), drift ? DRIFTED[drift.state]?.(drift) ?? drift.found : "the same"];
  }));
}

/** What was decided in a sentence; hints and candidates on demand. */
function decision(explanation) {
  return (explanation?.merges ?? []).map((merge, index, { length }) => {
    const where = merge.nodes === "" ? "no node" : merge.nodes === undefined || merge.nodes === null ? "any node" : nodes(merge.nodes);
    const best = merge.candidates.length > 1 ? `, of ${counted(merge.candidates.length, "candidate")}` : "";
    const hints = merge.hints.map((hint) => [
      hint.resource,
      hint.sets ? hint.sets.map((set) => `${set.nodes}${set.preferred ? "*" : ""}`).join("  ") || "none" : "anywhere",
    ]);
    const candidates = merge.candidates.map((candidate) => [candidate.nodes, candidate.preferred ? "yes" : "no", candidate.verdict]);
    return element(
      "details",
      { class: "decision" },
      element("summary", {}, element("b", {}, length > 1 ? `Decision ${index + 1}: ` : "Decision: "), `${merge.accepted ? "accepted" : "refused"} on ${where}${best}`),
      hints.length > 0 ? table("Hints: possible nodes of each resource", ["resource", "node sets (* preferred)"], hints) : null,
      table(hints.length > 0 ? "Candidates: hints that fit together" : "Candidates", ["nodes", "preferred", "verdict"], candidates),
    );
  });
}

function statusOf({ status, allocations, dropped }) {
  if (!status) return [element("p", { class: "quiet" }, "The daemon has not answered yet.")];
  const probes = status.probes.map((probe) => [
    probe.probe,
    element("span", { class: "chip", "data-level": probe.mode !== "absent" ? "good" : isOff(probe) ? null : "warn" }, probe.mode === "absent" ? "not attached" : "attached"),
    probe.mode,
    probe.coveragePermille === undefined ? "" : `${(probe.coveragePermille / 10).toFixed(1)} % of the kernel's pages`,
    probe.reason ?? "",
  ]);
  const parts = [table("Probes", ["probe", "state", "how", "seen in an hour", "reason"], probes)];
  if (status.degraded.length > 0) parts.push(table("Problems", ["part", "reason and remedy"], status.degraded.map(({ part, reason }) => [part, reason])));
  const waiting = allocations.waiting ?? [];
  if (waiting.length > 0) parts.push(table("Guarantees that cannot be given", ["cgroup", "declared for", "reason"], waiting.map((of) => [of.cgroup, of.declared, of.reason])));
  const pending = allocations.enforcement?.pendingRestores ?? [];
  if (pending.length > 0) {
    const rows = pending.map((of) => [of.cgroup, of.knob, knobValue(of.knob, of.written), knobValue(of.knob, of.found), of.reason ?? ""]);
    parts.push(table("Settings that cannot be given back yet", ["cgroup", "knob", "now", "original", "reason"], rows));
  }
  if (dropped > 0) parts.push(element("p", { class: "quiet" }, `No past is kept of ${counted(dropped, "workload")}: there are more than 1,000, and these were idle the longest.`));
  return parts;
}
