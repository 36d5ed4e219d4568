// Whether what is promised holds. Green: it does. Amber: not quite, or it is not known. Red: a promise is broken. Who has
// no guarantee has no colour: nothing was promised that could be broken.

import { brief, bytes, counted, list, nodes, percent, rate } from "./format.js";

/** From this share of memory on promised nodes on, a promise is kept; from the lower one on nearly. */
const KEPT = 0.999;
const NEARLY = 0.95;
const MISSED = "It got memory off the promised nodes within the last minute.";
/** For how long a miss counts as recent, in milliseconds. */
const RECENT = 60_000;

/** A workload's verdict: a level ("good", "warn", "bad" or null), a word, what it rests on, and who is at fault, where that is another. */
export function verdictOf(row, state) {
  const { allocation } = row;
  const missedOfLate = row.missedAt !== null && state.at - row.missedAt < RECENT;
  if (state.isForeign(row)) {
    // By the kubelet: of what it promised, only what is missed is known here.
    return missedOfLate
      ? { level: "bad", word: "broken", reasons: [MISSED], isForeign: true }
      : { level: "good", word: "kept", reasons: [], isForeign: true };
  }
  if (!allocation) {
    const { share } = row.locality;
    return { level: null, word: Number.isNaN(share) ? "–" : `${percent(share)} local`, reasons: [] };
  }
  const found = [];
  let culprit = null;
  const bad = (text) => found.push({ level: "bad", text });
  const warn = (text) => found.push({ level: "warn", text });
  const { share } = row.locality;
  // What a Burstable workload has beyond its promise may lie anywhere.
  const isBound = !allocation.placement?.burstable;
  if (isBound && row.locality.of === "promised" && share < KEPT) {
    (share < NEARLY ? bad : warn)(`${percent(1 - share)} of its memory lies off ${nodes(allocation.nodes)}.`);
  }
  if (isBound && missedOfLate) bad(MISSED);
  const intruded = list(allocation.cpus).filter((cpu) => state.intruded.has(cpu));
  if (intruded.length > 0) {
    const cpus = `${intruded.length === 1 ? "CPU" : "CPUs"} ${intruded.join(", ")}`;
    const [most, ...others] = row.who?.names ?? [];
    const who = most === undefined ? null : brief(most);
    bad(`${who ?? "Others"}${who && others.length > 0 ? " and others" : ""} ran on its exclusive ${cpus} within the last minute.`);
    culprit = { who: who ?? "others", where: intruded.length > 2 ? counted(intruded.length, "CPU") : cpus };
  }
  if (allocation.missing) {
    const gone = [allocation.missing.cpus ? `CPUs ${allocation.missing.cpus}` : null, ...allocation.missing.memory.map((of) => `${bytes(of.bytes)} of ${of.kind}`)];
    bad(`${gone.filter(Boolean).join(" and ")} of what is promised is not there.`);
  }
  for (const drift of allocation.drift.filter((of) => of.state !== "repaired" && of.cgroup === allocation.cgroup)) {
    (drift.state === "waiting" ? warn : bad)(`${drift.knob} is ${drift.found ?? "gone"} instead of ${drift.wanted}.`);
  }
  if (allocation.stalled) warn("It is slowed down at memory.high and makes no progress.");
  if (found.length === 0 && allocation.enforced === false) return { level: null, word: "dry run", reasons: ["Nothing is written: this is a dry run."] };
  if (found.length === 0 && Number.isNaN(share) && allocation.nodes) {
    return { level: "warn", word: "not known", reasons: ["Where its memory lies is not known."] };
  }
  const level = found.some((one) => one.level === "bad") ? "bad" : found.length > 0 ? "warn" : "good";
  const word = { bad: "broken", warn: "nearly kept", good: "kept" }[level];
  return { level, word, reasons: found.map((one) => one.text), culprit };
}

/** The host's verdict: parts with a level, a text, and where each is explained. */
export function hostVerdict(state) {
  const parts = [];
  const rows = [...state.workloads.values()];
  const promised = rows.filter((row) => row.allocation || row.verdict?.isForeign);
  const count = (level) => promised.filter((row) => row.verdict?.level === level).length;
  const [broken, nearly] = [count("bad"), count("warn")];
  if (broken > 0) parts.push({ level: "bad", text: `${counted(broken, "promise")} broken${broken === 1 ? fault(promised) : ""}`, go: { filter: "is:broken" } });
  if (nearly > 0) parts.push({ level: "warn", text: `${counted(nearly, "promise")} nearly kept`, go: { filter: "is:nearly" } });
  if (promised.length === 0 && !state.isPromiseKnown) {
    parts.push({ level: null, text: "promises not known", go: {} });
  } else if (broken + nearly === 0) {
    parts.push(promised.length > 0
      ? { level: "good", text: promised.length === 1 ? "1 promise kept" : `all ${promised.length} promises kept`, go: { promised: true } }
      : { level: null, text: "nothing is promised", go: {} });
  }
  const waiting = state.allocations.waiting?.length ?? 0;
  if (waiting > 0) parts.push({ level: "warn", text: `${counted(waiting, "guarantee")} cannot be given`, go: { status: true } });
  const pending = state.allocations.enforcement?.pendingRestores?.length ?? 0;
  if (pending > 0) parts.push({ level: "warn", text: `${counted(pending, "setting")} not given back yet`, go: { status: true } });
  const missing = promised.reduce((sum, row) => sum + (row.rates.missed || 0), 0);
  const missed = promised.reduce((sum, row) => sum + row.totals.missed, 0);
  const misses = missing > 0 ? `${rate(missing)} missed` : missed > 0 ? `no misses now, ${bytes(missed)} before` : "no misses";
  if (promised.length > 0) parts.push({ level: missing > 0 ? "bad" : null, text: misses, href: "runbooks/NumawardNumaMisses" });
  // Allocated, not accessed: the map between nodes shows accesses.
  const known = rows.filter((row) => row.totals.counted && !Number.isNaN(row.rates.remote));
  const remote = known.reduce((sum, row) => sum + row.rates.remote, 0);
  const allocated = known.length === 0 ? "remote allocation not known" : `${remote > 0 ? rate(remote) : "nothing"} allocated remotely`;
  parts.push({ level: null, text: allocated, go: { sort: "-remote" } });
  const { status } = state;
  if (status) {
    const low = status.headroom.filter((node) => node.low).map((node) => node.node);
    if (low.length > 0) parts.push({ level: "warn", text: `little room on ${nodes(low.join(","))}`, href: "runbooks/NumawardHeadroomLow" });
    const wanted = status.probes.filter((probe) => !isOff(probe));
    const attached = wanted.filter((probe) => probe.mode !== "absent").length;
    parts.push({ level: attached < wanted.length ? "warn" : null, text: `probes ${attached} of ${wanted.length}`, go: { status: true } });
    if (status.degraded.length > 0) parts.push({ level: "warn", text: `${counted(status.degraded.length, "part")} degraded`, go: { status: true } });
  }
  const level = ["bad", "warn", "good"].find((one) => parts.some((part) => part.level === one)) ?? null;
  return { level, parts };
}

/** Who broke the one promise that is broken, if that is known. */
function fault(promised) {
  const { workload, verdict } = promised.find((row) => row.verdict?.level === "bad");
  return verdict.culprit ? `: ${verdict.culprit.who} ran on ${verdict.culprit.where} of ${brief(workload.workload)}` : "";
}

/** Whether a probe is not attached because it is not to be. */
export function isOff(probe) {
  return probe.mode === "absent" && (probe.reason ?? "").startsWith("switched off");
}

/** Whether the verdict is what the words `is:…` of the filter ask for. */
export function isSo(row, word) {
  const { level } = row.verdict ?? {};
  return { broken: level === "bad", nearly: level === "warn", kept: level === "good" }[word] ?? false;
}
