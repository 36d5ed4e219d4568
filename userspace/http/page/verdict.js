// Whether the guarantees hold. Green: they do. Amber: not quite, or it is not known. Red: a guarantee is broken. A workload
// without a guarantee has no colour.

import { brief, bytes, counted, list, nodes, percent, rate } from "./format.js";

const MISSED = "It got memory off its guaranteed nodes within the last minute.";
/** For how long a miss counts as recent, in milliseconds. */
const RECENT = 60_000;

/** A workload's verdict: a level ("good", "warn", "bad" or null), a word, what it rests on, and who is at fault, where that is another. */
export function verdictOf(row, state) {
  const { allocation, workload } = row;
  const missedOfLate = row.missedAt !== null && state.at - row.missedAt < RECENT;
  const residency = workload.residency ?? [];
  const found = [];
  const bad = (text) => found.push({ level: "bad", text });
  const warn = (text) => found.push({ level: "warn", text });
  // Whether memory is off its nodes is for the daemon to say, so that all agree.
  for (const { kind, off } of residency.filter((of) => of.broken)) bad(`${typesOf(kind, off)} off its guaranteed nodes.`);
  if (missedOfLate) warn(MISSED);
  if (state.isForeign(row)) {
    // The kubelet's guarantee: only its memory is known here.
    return { ...summary(found), isForeign: true };
  }
  if (!allocation) {
    const { share } = row.locality;
    return { level: null, word: Number.isNaN(share) ? "–" : `${percent(share)} local`, reasons: [] };
  }
  let culprit = null;
  const intruded = list(workload.intrudedCpus);
  if (intruded.length > 0) {
    const cpus = `${intruded.length === 1 ? "CPU" : "CPUs"} ${intruded.join(", ")}`;
    const [most, ...others] = row.who?.names ?? [];
    const who = most === undefined ? null : brief(most);
    bad(`${who ?? "Others"}${who && others.length > 0 ? " and others" : ""} ran on its exclusive ${cpus} within the last minute.`);
    culprit = { who: who ?? "others", where: intruded.length > 2 ? counted(intruded.length, "CPU") : cpus };
  }
  if (allocation.missing) {
    const gone = [allocation.missing.cpus ? `CPUs ${allocation.missing.cpus}` : null, ...allocation.missing.memory.map((of) => `${bytes(of.bytes)} of ${of.kind}`)];
    bad(`Guaranteed to it but missing: ${gone.filter(Boolean).join(" and ")}.`);
  }
  for (const drift of allocation.drift.filter((of) => of.state !== "repaired" && of.cgroup === allocation.cgroup)) {
    (drift.state === "waiting" ? warn : bad)(`${drift.knob} is ${drift.found ?? "gone"} instead of ${drift.wanted}.`);
  }
  if (allocation.stalled) warn("It is slowed down at memory.high and makes no progress.");
  const isDryRun = state.allocations?.enforcement?.mode === "dry-run";
  if (allocation.enforced === false && !isDryRun) bad("It is not written to the kernel: the log has the reason, and it is tried again.");
  if (found.length === 0 && allocation.enforced === false) return { level: null, word: "dry run", reasons: ["Nothing is written: this is a dry run."] };
  if (found.length === 0 && residency.length === 0 && allocation.memory.length > 0) {
    return { level: "warn", word: "not known", reasons: ["Where its memory lies is not known."] };
  }
  return { ...summary(found), culprit };
}

function summary(found) {
  const level = found.some((one) => one.level === "bad") ? "bad" : found.length > 0 ? "warn" : "good";
  const word = { bad: "broken", warn: "nearly kept", good: "kept" }[level];
  return { level, word, reasons: found.map((one) => one.text) };
}

/** Memory by type, as the begin of a sentence. */
function typesOf(kind, { anonBytes, shmemBytes, fileBytes }) {
  if (kind !== "memory") return `${bytes(anonBytes)} of its ${kind} are`;
  const types = [[anonBytes, "anonymous"], [shmemBytes, "shared"], [fileBytes, "page cache"]].filter(([size]) => size > 0);
  return `${bytes(anonBytes + shmemBytes + fileBytes)} of its memory (${types.map(([size, type]) => `${bytes(size)} ${type}`).join(", ")}) are`;
}

/** The host's verdict: parts with a level, a text, and where each is explained. */
export function hostVerdict(state) {
  const parts = [];
  const rows = [...state.workloads.values()];
  const guaranteed = rows.filter((row) => row.allocation || row.verdict?.isForeign);
  const count = (level) => guaranteed.filter((row) => row.verdict?.level === level).length;
  const [broken, nearly] = [count("bad"), count("warn")];
  if (broken > 0) parts.push({ level: "bad", text: `${counted(broken, "guarantee")} broken${broken === 1 ? fault(guaranteed) : ""}`, go: { filter: "is:broken" } });
  if (nearly > 0) parts.push({ level: "warn", text: `${counted(nearly, "guarantee")} nearly kept`, go: { filter: "is:nearly" } });
  if (guaranteed.length === 0 && !state.areGuaranteesKnown) {
    parts.push({ level: null, text: "guarantees not known", go: {} });
  } else if (broken + nearly === 0) {
    parts.push(guaranteed.length > 0
      ? { level: "good", text: guaranteed.length === 1 ? "1 guarantee kept" : `all ${guaranteed.length} guarantees kept`, go: { guaranteed: true } }
      : { level: null, text: "no guarantees", go: {} });
  }
  const waiting = state.allocations.waiting?.length ?? 0;
  if (waiting > 0) parts.push({ level: "warn", text: `${counted(waiting, "guarantee")} cannot be given`, go: { status: true } });
  const pending = state.allocations.enforcement?.pendingRestores?.length ?? 0;
  if (pending > 0) parts.push({ level: "warn", text: `${counted(pending, "setting")} not given back yet`, go: { status: true } });
  const missing = guaranteed.reduce((sum, row) => sum + (row.rates.missed || 0), 0);
  const missed = guaranteed.reduce((sum, row) => sum + row.totals.missed, 0);
  const misses = missing > 0 ? `${rate(missing)} missed` : missed > 0 ? `no misses now, ${bytes(missed)} before` : "no misses";
  if (guaranteed.length > 0) parts.push({ level: missing > 0 ? "bad" : null, text: misses, href: "runbooks/NumawardNumaMisses" });
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

/** Who broke the only broken guarantee, if that is known. */
function fault(guaranteed) {
  const { workload, verdict } = guaranteed.find((row) => row.verdict?.level === "bad");
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
