// Numbers as people read them, and sets as the kernel writes them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes in binary units, with three digits. */
export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

/** Bytes per second; nothing for none, so that what moves stands out. */
export function rate(value) {
  if (Number.isNaN(value)) return "–";
  return value > 0 ? `${bytes(value)}/s` : "0";
}

/** A share of 1 in percent; what is not zero never reads as zero, and what is not all never as all. */
export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const value = share * 100;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  if (value >= 99 && value < 100) return `${Math.min(value, 99.9).toFixed(1)} %`;
  return `${value.toFixed(value < 10 && value > 0 ? 1 : 0)} %`;
}

/** A large number in at most four characters: 9999, 18k, 2M. */
export function short(count) {
  let [value, unit] = [count, 0];
  while (value >= 10000 || (unit > 0 && value >= 1000)) [value, unit] = [value / 1000, unit + 1];
  return unit === 0 ? String(count) : `${Math.floor(value)}${"kMGTPE"[unit - 1]}`;
}

/** A number of things. */
export function counted(count, thing) {
  return `${count} ${thing}${count === 1 ? "" : "s"}`;
}

/** Microseconds as seconds: milliseconds matter where a CPU should be left alone. */
export function seconds(micros) {
  return `${(micros / 1e6).toFixed(3)} s`;
}

/** The numbers of a list in the kernel's format, such as "0-3,8". */
export function list(text) {
  const numbers = [];
  for (const part of (text ?? "").split(",")) {
    if (part === "") continue;
    const [first, last = first] = part.split("-").map(Number);
    if (!Number.isInteger(first) || !Number.isInteger(last)) continue;
    for (let number = first; number <= last; number += 1) numbers.push(number);
  }
  return numbers;
}

/** A duration in words of two units at most. */
export function duration(seconds) {
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const words = [];
  for (const [name, size] of parts) {
    const count = Math.floor(seconds / size);
    if (count > 0 && words.length < 2) words.push(`${count} ${name}`);
    seconds -= count * size;
  }
  return words.join(" ") || "0 s";
}

/** A list of nodes with the word: "node 0", "nodes 0-1". */
export function nodes(text) {
  return `${/[,-]/.test(text) ? "nodes" : "node"} ${text}`;
}

/** A name within a sentence: on one line, and not longer than a line. */
export function brief(name) {
  const line = name.replace(/\s+/g, " ");
  return line.length > 40 ? `${line.slice(0, 39)}…` : line;
}

/** A guarantee, in short: "1 CPU, 160 MiB on node 0". */
export function guarantee(allocation) {
  return [guaranteedAmount(allocation), guaranteedNodes(allocation)].filter(Boolean).join(" on ");
}

/** The amounts of a guarantee: "1 CPU, 160 MiB". */
export function guaranteedAmount({ cpus, memory }) {
  const count = list(cpus).length;
  const sizes = new Map();
  for (const { kind, bytes: size } of memory) sizes.set(kind, (sizes.get(kind) ?? 0) + size);
  const parts = count > 0 ? [counted(count, "CPU")] : [];
  // Guaranteed memory is mostly a round number.
  const round = (size) => bytes(size).replace(/\.0+ /, " ");
  for (const [kind, size] of sizes) parts.push(kind === "memory" ? round(size) : `${round(size)} of ${kind}`);
  return parts.join(", ") || "shared CPUs";
}

/** The nodes of a guarantee: "node 0"; empty if any node will do. */
export function guaranteedNodes({ nodes: all }) {
  return all ? nodes(all) : "";
}

/** What a knob holds, with its unit. */
export function knobValue(knob, value) {
  return /^(memory|hugetlb)\./.test(knob) && /^\d+$/.test(value) ? bytes(Number(value)) : value;
}

/** An element with attributes and children. Text is always set as text, never as markup. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key === "style") made.style.cssText = value;
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) made.append(child);
  }
  return made;
}
