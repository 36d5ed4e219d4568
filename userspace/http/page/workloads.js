// The workloads as a table that can be sorted and filtered. Only the rows in sight are in the document, so
// that thousands cost no more than thirty.

import { Sparkline } from "./chart.js";
import { bytes, element, guarantee, guaranteedAmount, guaranteedNodes, percent, rate } from "./format.js";
import { address } from "./route.js";
import { isSo } from "./verdict.js";

/** Height of a row in pixels; the style sheet's 2rem at the usual size is measured, this is the first guess. */
const ROW = 28;
const SPARE = 6;
/** The worst verdict first; those without a guarantee come last. */
const WORST = { bad: 0, warn: 1, good: 2 };
const NO_VERDICT = 3;

const COLUMNS = [
  { id: "name", label: "workload", value: (row) => row.workload.workload, text: true },
  { id: "guarantee", label: "guarantee", value: (row) => row.allocation?.memory.reduce((sum, of) => sum + of.bytes, 0) ?? -1 },
  { id: "verdict", label: "verdict", value: (row) => WORST[row.verdict.level] ?? NO_VERDICT, ascending: true },
  { id: "memory", label: "memory", value: residentOf },
  { id: "nodes", label: "by node", value: (row) => Math.max(0, ...row.totals.byNode.map(({ bytes }) => bytes)) / (row.totals.resident || 1), ascending: true },
  { id: "local", label: "local/s", value: (row) => row.rates.local || 0 },
  { id: "remote", label: "remote/s", value: (row) => row.rates.remote || 0 },
  { id: "past", label: "10 min" },
];
/** A broken guarantee is in sight, whatever its size. */
const SORT = "verdict";

export class WorkloadsView {
  #sort = { id: SORT, down: false };
  #filter = () => true;
  #rows = [];
  #height = ROW;
  #sparks = new WeakMap();

  /** `changed` is called when the user filters or sorts: `place` then says how. */
  constructor({ box, head, body, count, filter, guaranteedOnly, open, changed }) {
    Object.assign(this, { box, head, body, count, filter, guaranteedOnly, open, changed });
    this.above = element("tr", { class: "space", "aria-hidden": "true" }, element("td", { colspan: COLUMNS.length }));
    this.below = this.above.cloneNode(true);
    for (const column of COLUMNS) {
      const inner = column.value ? element("button", { type: "button" }, column.label) : column.label;
      const cell = element("th", { scope: "col", class: `c-${column.id}` }, inner);
      if (column.value) inner.addEventListener("click", () => this.#sortBy(column));
      column.cell = cell;
      head.append(cell);
    }
    const refilter = () => {
      this.#apply();
      this.changed();
    };
    filter.addEventListener("input", refilter);
    guaranteedOnly.addEventListener("change", refilter);
    box.addEventListener("scroll", () => requestAnimationFrame(() => this.#paint()), { passive: true });
    new ResizeObserver(() => this.#paint()).observe(box);
    this.#mark();
  }

  /** What is shown, as a part of an address. */
  get place() {
    const sort = `${this.#sort.down ? "-" : ""}${this.#sort.id}`;
    return { filter: this.filter.value, guaranteed: this.guaranteedOnly.checked, sort: sort === SORT ? null : sort };
  }

  /** Shows what an address says. */
  goTo({ filter, guaranteed, sort }) {
    const id = (sort ?? SORT).replace(/^-/, "");
    const column = COLUMNS.find((column) => column.id === id && column.value);
    if (column) this.#sort = { id, down: (sort ?? SORT).startsWith("-") };
    if (this.filter.value !== filter) this.filter.value = filter;
    this.guaranteedOnly.checked = guaranteed;
    this.#mark();
    this.#apply();
  }

  #apply() {
    this.#filter = matcher(this.filter.value, this.guaranteedOnly.checked);
    this.update(this.state);
  }

  #sortBy(column) {
    const down = this.#sort.id === column.id ? !this.#sort.down : !(column.text || column.ascending);
    this.#sort = { id: column.id, down };
    this.#mark();
    this.update(this.state);
    this.changed();
  }

  #mark() {
    for (const column of COLUMNS.filter((column) => column.value)) {
      const sorted = column.id === this.#sort.id;
      if (sorted) column.cell.setAttribute("aria-sort", this.#sort.down ? "descending" : "ascending");
      else column.cell.removeAttribute("aria-sort");
      column.cell.firstChild.textContent = column.label + (sorted ? (this.#sort.down ? " ▾" : " ▴") : "");
    }
  }

  update(state) {
    if (!state?.at) return;
    this.state = state;
    const { value } = COLUMNS.find((column) => column.id === this.#sort.id);
    const sign = this.#sort.down ? -1 : 1;
    const rows = [...state.workloads.values()].filter((row) => this.#filter(row));
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x !== y) return (x < y ? -1 : 1) * sign;
      const larger = residentOf(b) - residentOf(a);
      if (larger !== 0) return larger;
      return a.key < b.key ? -1 : 1;
    });
    this.#rows = rows;
    const all = state.workloads.size;
    const none = rows.length === 0 && all > 0 ? ", none match" : "";
    this.count.textContent = (rows.length === all ? String(all) : `${rows.length} of ${all}`) + none;
    this.count.title = state.dropped > 0 ? `of ${state.dropped} that were idle the longest no past is kept` : "";
    this.#paint();
  }

  /** Puts the rows in sight into the document; those that are there already are kept, and with them the focus. */
  #paint() {
    if (!this.state) return;
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.#height) - SPARE);
    const many = Math.ceil(this.box.clientHeight / this.#height) + 2 * SPARE;
    const shown = this.#rows.slice(first, first + many);
    const kept = new Map([...this.body.querySelectorAll("tr[data-key]")].map((tr) => [tr.dataset.key, tr]));
    const wanted = shown.map((row) => this.#fill(kept.get(row.key) ?? this.#make(row.key), row));
    this.above.firstChild.style.height = `${first * this.#height}px`;
    this.below.firstChild.style.height = `${Math.max(0, this.#rows.length - first - shown.length) * this.#height}px`;
    const children = [this.above, ...wanted, this.below];
    const focused = document.activeElement?.closest?.("tr[data-key]")?.dataset.key;
    if (children.length !== this.body.children.length || children.some((child, index) => this.body.children[index] !== child)) {
      this.body.replaceChildren(...children);
      if (focused !== undefined) wanted.find((tr) => tr.dataset.key === focused)?.querySelector("a")?.focus({ preventScroll: true });
    }
    const measured = wanted[0]?.getBoundingClientRect().height;
    if (measured > 0 && Math.abs(measured - this.#height) > 0.5) {
      this.#height = measured;
      this.#paint();
    }
  }

  #make(key) {
    const link = element("a", {});
    link.addEventListener("click", (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      this.open(key);
    });
    const strip = element("span", { class: "strip", role: "img" });
    const spark = new Sparkline(100, 20);
    // Where it is cut, it is not the node that is cut off.
    const cell = element("span", { class: "guarantee" }, element("span", { class: "much" }), element("span", { class: "where" }));
    const inner = { guarantee: cell, nodes: strip, past: spark.element, verdict: element("span", { class: "chip" }) };
    const cells = COLUMNS.slice(1).map((column) => element("td", { class: `c-${column.id}` }, inner[column.id] ?? ""));
    const tr = element("tr", { "data-key": key }, element("th", { scope: "row" }, link), cells);
    this.#sparks.set(tr, spark);
    return tr;
  }

  #fill(tr, row) {
    const [name, given, verdict, size, nodes, local, remote] = tr.children;
    set(name.firstChild, row.workload.workload);
    name.firstChild.title = row.workload.cgroup ?? row.workload.kind;
    const href = address({ ...this.place, workload: this.state.nameOf(row) });
    if (name.firstChild.getAttribute("href") !== href) name.firstChild.setAttribute("href", href);
    const { allocation } = row;
    const other = row.verdict.isForeign ? "by the kubelet" : "–";
    const where = allocation ? guaranteedNodes(allocation) : "";
    const [much, on] = given.firstChild.children;
    set(much, allocation ? guaranteedAmount(allocation) : other);
    set(on, where && ` · ${where}`);
    const all = allocation ? guarantee(allocation) : other;
    if (given.title !== all) given.title = all;
    verdictChip(verdict.firstChild, row);
    set(size, bytes(row.totals.resident ?? NaN));
    residency(nodes.firstChild, row);
    set(local, row.totals.counted ? rate(row.rates.local) : "–");
    set(remote, row.totals.counted ? rate(row.rates.remote) : "–");
    this.#sparks.get(tr).draw(row.key, row.trend, this.state.at, (most, known) => (known ? `at most ${rate(most)}` : "not known"));
    return tr;
  }
}

/** What is not known is less than nothing. */
function residentOf(row) {
  return row.totals.resident ?? -1;
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A verdict in a word, in the colour of its level. */
export function verdictChip(chip, row) {
  const { level, word, reasons } = row.verdict;
  const text = level === "bad" || level === "warn" ? lapse(row, word) : word;
  set(chip, text);
  const title = reasons.join(" ") || (row.locality.of === "guaranteed" ? `${percent(row.locality.share)} of its user memory lies on its guaranteed nodes` : "of what it allocated was local");
  if (chip.title !== title) chip.title = title;
  if (level) chip.dataset.level = level;
  else delete chip.dataset.level;
}

function lapse(row, word) {
  const { culprit } = row.verdict;
  if (culprit) return `${word}: ${culprit.who} on ${culprit.where}`;
  const isOff = (row.workload.residency ?? []).some((of) => of.broken);
  return isOff ? `${word}, ${percent(1 - row.locality.share)} off` : word;
}

/** Where memory lies: a column for each node, as high as its share; the guaranteed ones have a frame. */
function residency(strip, row) {
  const { totals } = row;
  const frames = new Set(row.allocation?.nodeNumbers);
  const shares = totals.byNode.filter(({ bytes }) => bytes > 0);
  const said = shares.map(({ node, bytes: size }) => `node ${node}: ${bytes(size)}`).join(", ") || "nothing";
  const label = frames.size > 0 ? `${said}; guaranteed on ${[...frames].join(", ")}` : said;
  if (strip.getAttribute("aria-label") === label) return;
  strip.setAttribute("aria-label", label);
  strip.title = label;
  strip.replaceChildren(...totals.byNode.map(({ node, bytes }) => element(
    "span",
    { class: frames.has(node) ? "place guaranteed" : "place" },
    element("span", { style: `height: ${totals.resident > 0 ? (bytes / totals.resident) * 100 : 0}%` }),
  )));
}

/**
 * Words are looked for in name, kind and cgroup; `node:N` asks for memory on that node, `is:broken` for a verdict. All must
 * match.
 */
function matcher(text, guaranteedOnly) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return (row) => {
    if (guaranteedOnly && !row.allocation && !row.totals.hasGuarantee) return false;
    const haystack = `${row.workload.workload} ${row.workload.kind} ${row.workload.cgroup ?? ""}`.toLowerCase();
    return words.every((word) => {
      const verdict = /^is:(\w+)$/.exec(word);
      if (verdict) return isSo(row, verdict[1]);
      const node = /^node:(\d+)$/.exec(word);
      if (!node) return haystack.includes(word);
      return row.totals.byNode.some((part) => part.node === Number(node[1]) && part.bytes > 0);
    });
  };
}
