// The workloads as a table that can be sorted and filtered. Only the rows in sight are in the document, so
// that thousands cost no more than thirty.

import { bytes, element, nodeColour, percent, rate } from "./format.js";

/** Height of a row in pixels; the style sheet's 2rem at the usual size is measured, this is the first guess. */
const ROW = 28;
const SPARE = 6;

const COLUMNS = [
  { id: "name", label: "workload", value: (row) => row.workload.workload, text: true },
  { id: "resident", label: "memory by node", value: (row) => row.totals.resident ?? -1, wide: true },
  { id: "size", label: "resident", value: (row) => row.totals.resident ?? -1 },
  { id: "locality", label: "local", value: (row) => (Number.isNaN(row.locality.share) ? 2 : row.locality.share), ascending: true },
  { id: "local", label: "local/s", value: (row) => row.rates.local },
  { id: "remote", label: "remote/s", value: (row) => row.rates.remote },
  { id: "missed", label: "missed", value: (row) => (row.allocation ? row.totals.missed : -1) },
];

export class WorkloadsView {
  #sort = { id: "size", down: true };
  #filter = () => true;
  #rows = [];
  #height = ROW;

  constructor({ box, head, body, count, filter, promisedOnly, open }) {
    Object.assign(this, { box, head, body, count, open });
    this.above = element("tr", { class: "space", "aria-hidden": "true" }, element("td", { colspan: COLUMNS.length }));
    this.below = this.above.cloneNode(true);
    for (const column of COLUMNS) {
      const button = element("button", { type: "button" }, column.label);
      const cell = element("th", { scope: "col", class: column.wide ? "wide" : null }, button);
      button.addEventListener("click", () => this.#sortBy(column));
      column.cell = cell;
      head.append(cell);
    }
    const refilter = () => {
      this.#filter = matcher(filter.value, promisedOnly.checked);
      this.update(this.state);
    };
    filter.addEventListener("input", refilter);
    promisedOnly.addEventListener("change", refilter);
    box.addEventListener("scroll", () => requestAnimationFrame(() => this.#paint()), { passive: true });
    this.#mark();
  }

  #sortBy(column) {
    const down = this.#sort.id === column.id ? !this.#sort.down : !(column.text || column.ascending);
    this.#sort = { id: column.id, down };
    this.#mark();
    this.update(this.state);
  }

  #mark() {
    for (const column of COLUMNS) {
      const sorted = column.id === this.#sort.id;
      if (sorted) column.cell.setAttribute("aria-sort", this.#sort.down ? "descending" : "ascending");
      else column.cell.removeAttribute("aria-sort");
      column.cell.firstChild.textContent = column.label + (sorted ? (this.#sort.down ? " ▾" : " ▴") : "");
    }
  }

  update(state) {
    if (!state) return;
    this.state = state;
    const { value } = COLUMNS.find((column) => column.id === this.#sort.id);
    const sign = this.#sort.down ? -1 : 1;
    const rows = [...state.workloads.values()].filter((row) => this.#filter(row));
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x !== y) return (x < y ? -1 : 1) * sign;
      return a.key < b.key ? -1 : 1;
    });
    this.#rows = rows;
    const all = state.workloads.size;
    this.count.textContent = rows.length === all ? String(all) : `${rows.length} of ${all}`;
    this.#paint();
  }

  /** Puts the rows in sight into the document; those that are there already are kept, and with them the focus. */
  #paint() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.#height) - SPARE);
    const many = Math.ceil(this.box.clientHeight / this.#height) + 2 * SPARE;
    const shown = this.#rows.slice(first, first + many);
    const kept = new Map([...this.body.querySelectorAll("tr[data-key]")].map((tr) => [tr.dataset.key, tr]));
    const wanted = shown.map((row) => fill(kept.get(row.key) ?? this.#make(row.key), row));
    this.above.firstChild.style.height = `${first * this.#height}px`;
    this.below.firstChild.style.height = `${Math.max(0, this.#rows.length - first - shown.length) * this.#height}px`;
    const children = [this.above, ...wanted, this.below];
    const focused = document.activeElement?.closest?.("tr[data-key]")?.dataset.key;
    if (children.length !== this.body.children.length || children.some((child, index) => this.body.children[index] !== child)) {
      this.body.replaceChildren(...children);
      if (focused !== undefined) wanted.find((tr) => tr.dataset.key === focused)?.querySelector("button")?.focus({ preventScroll: true });
    }
    const measured = wanted[0]?.getBoundingClientRect().height;
    if (measured > 0 && Math.abs(measured - this.#height) > 0.5) {
      this.#height = measured;
      this.#paint();
    }
    if (this.#rows.length === 0 && this.state.workloads.size > 0) this.count.textContent += ", none match";
  }

  #make(key) {
    const button = element("button", { type: "button" });
    button.addEventListener("click", () => this.open(key));
    const bar = element("div", { class: "bar-of", role: "img" });
    const cells = COLUMNS.slice(1).map((column) => element("td", {}, column.id === "resident" ? bar : ""));
    return element("tr", { "data-key": key }, element("th", { scope: "row" }, button), cells);
  }
}

function fill(tr, row) {
  const [name, bar, size, local, localRate, remoteRate, missed] = tr.children;
  set(name.firstChild, row.workload.workload);
  name.firstChild.title = row.workload.cgroup ?? row.workload.kind;
  residency(bar.firstChild, row.totals);
  set(size, bytes(row.totals.resident ?? NaN));
  level(local, row.locality);
  set(localRate, row.totals.counted ? rate(row.rates.local) : "–");
  set(remoteRate, row.totals.counted ? rate(row.rates.remote) : "–");
  set(missed, row.allocation ? bytes(row.totals.missed) : "–");
  return tr;
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function level(cell, locality) {
  if (!cell.firstElementChild) cell.replaceChildren(element("span", { class: "level" }));
  const span = cell.firstElementChild;
  set(span, percent(locality.share));
  span.title = locality.of === "promised" ? "of its memory lies on the promised nodes" : "of its allocations were local";
  if (locality.level) span.dataset.level = locality.level;
  else delete span.dataset.level;
}

function residency(bar, totals) {
  const shares = totals.byNode.filter(({ bytes }) => bytes > 0);
  const label = shares.map(({ node, bytes: size }) => `node ${node}: ${bytes(size)}`).join(", ") || "nothing";
  if (bar.getAttribute("aria-label") !== label) {
    bar.setAttribute("aria-label", label);
    bar.title = label;
    bar.replaceChildren(...shares.map(({ node, bytes }) => element("span", {
      style: `width: ${(bytes / totals.resident) * 100}%; background: ${nodeColour(node)}`,
    })));
  }
}

/** Words are looked for in name, kind and cgroup; `node:N` asks for memory on that node. All must match. */
function matcher(text, promisedOnly) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return (row) => {
    if (promisedOnly && !row.allocation) return false;
    const haystack = `${row.workload.workload} ${row.workload.kind} ${row.workload.cgroup ?? ""}`.toLowerCase();
    return words.every((word) => {
      const node = /^node:(\d+)$/.exec(word);
      if (!node) return haystack.includes(word);
      return row.totals.byNode.some((part) => part.node === Number(node[1]) && part.bytes > 0);
    });
  };
}
