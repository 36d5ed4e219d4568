// Puts the page together.

import { DetailView } from "./detail.js";
import { EventsView } from "./events.js";
import { duration, element, list } from "./format.js";
import { MachineView } from "./machine.js";
import { MatrixView } from "./matrix.js";
import * as route from "./route.js";
import { State } from "./state.js";
import { fetchJson, follow } from "./stream.js";
import { hostVerdict } from "./verdict.js";
import { WorkloadsView } from "./workloads.js";

/** How often the daemon is asked how it is itself, in milliseconds. */
const STATUS = 30_000;

const byId = (id) => document.getElementById(id);
const state = new State();

const machine = new MachineView(byId("machine"), byId("legend"));
const matrix = new MatrixView(byId("matrix"), byId("matrix-kind"), () => matrix.update(state));
const events = new EventsView(byId("events"));
const detail = new DetailView({
  dialog: byId("detail"),
  title: byId("detail-title"),
  body: byId("detail-body"),
  close: byId("close"),
  closed: () => route.go(workloads.place, { step: true }),
});
const workloads = new WorkloadsView({
  box: byId("table"),
  head: byId("head"),
  body: byId("rows"),
  count: byId("count"),
  filter: byId("filter"),
  guaranteedOnly: byId("guaranteed-only"),
  open: (key) => {
    route.go({ ...workloads.place, workload: state.nameOf(state.workloads.get(key)) }, { step: true });
    detail.open(state, key);
  },
  changed: () => route.go(workloads.place),
});

/** Whether the address names a workload that has not been seen yet. */
let wanted = null;

/** Shows what the address says. */
function goThere() {
  const place = route.read();
  if (!place) return;
  workloads.goTo(place);
  wanted = null;
  notice("wanted", null);
  if (place.status) return detail.showStatus(state);
  if (place.workload === null) return detail.close();
  const row = state.find(place.workload);
  if (row && !detail.shows(row.key)) detail.open(state, row.key);
  if (!row) wanted = place.workload;
  return undefined;
}

/** Opens the workload of the address once it is there; says so if it is not. */
function openWanted() {
  if (wanted === null) return;
  const row = state.find(wanted);
  notice("wanted", row ? null : `There is no workload ${wanted.slice(0, 200)}.`);
  if (!row) return;
  wanted = null;
  detail.open(state, row.key);
}

/** Says what is wrong until it is right again. */
const notices = new Map();
function notice(topic, text) {
  if (notices.get(topic) === text || (text === null && !notices.has(topic))) return;
  if (text === null) notices.delete(topic);
  else notices.set(topic, text);
  byId("notices").replaceChildren(...[...notices.values()].map((text) => element("p", { class: "notice" }, text)));
}

async function attempt(topic, work) {
  try {
    await work();
    notice(topic, null);
  } catch (error) {
    notice(topic, error.message);
  }
}

async function loadMachine() {
  [state.topology, state.version] = await Promise.all([fetchJson("api/v1/topology"), fetchJson("api/v1/version")]);
  machine.build(state.topology);
  matrix.update(state);
  byId("about").textContent = `numaward ${state.version.version}, Linux ${state.version.kernel}`;
  paint();
}

async function loadAllocations() {
  const fetched = await fetchJson("api/v1/allocations").finally(() => state.answered());
  for (const allocation of fetched.allocations) allocation.nodeNumbers = list(allocation.nodes);
  state.setAllocations(fetched);
  paint();
}

async function loadStatus() {
  state.status = await fetchJson("api/v1/status");
  const { host } = state.status;
  if (host) {
    byId("host").textContent = host;
    document.title = `${host} – numaward`;
  }
  if (route.read()?.status) detail.showStatus(state);
  paint();
}

let asking = false;
/** Asks who runs on exclusive CPUs of others, one workload after the other. */
async function askWho() {
  if (asking) return;
  asking = true;
  for (const row of state.toAsk()) {
    const answer = await fetchJson(`api/v1/workloads/${encodeURIComponent(row.workload.workload)}/intruders`).catch(() => null);
    state.ran(row, answer?.intruders);
    paint();
  }
  asking = false;
}

/** What was before the page was opened. */
async function loadPast() {
  const [history, trends] = await Promise.all([fetchJson("api/v1/history"), fetchJson("api/v1/history/workloads")]);
  state.past(history, trends);
  paint();
}

async function loadEvents() {
  const page = await fetchJson("api/v1/events");
  for (const event of page.events) take(event);
}

function take(event) {
  if (!state.event(event)) return;
  events.add(event);
  if (event.kind === "machine_change") attempt("machine", loadMachine);
}

let shown = null;
/** The line that says whether all is well; each part leads to what it is about. */
function showVerdict() {
  const { level, parts } = hostVerdict(state);
  // The order that somebody chose stays.
  const { sort } = workloads.place;
  const links = parts.map((part) => ({ ...part, href: part.href ?? route.address({ sort, ...part.go }) }));
  const now = JSON.stringify(links);
  if (now === shown) return;
  const line = byId("verdict");
  if (line.children.length !== links.length) line.replaceChildren(...links.map(() => element("a", { href: "#/" })));
  links.forEach(({ level, text, href }, index) => {
    const link = line.children[index];
    if (link.textContent !== text) link.textContent = text;
    if (link.getAttribute("href") !== href) link.setAttribute("href", href);
    if (level) link.dataset.level = level;
    else delete link.dataset.level;
  });
  if (level) line.dataset.level = level;
  else delete line.dataset.level;
  // What is read aloud changes when a verdict does, not with each rate.
  const spoken = parts.filter((part) => part.level && !part.href).map((part) => part.text).join(", ");
  if (byId("spoken").textContent !== spoken) byId("spoken").textContent = spoken;
  shown = now;
}

let painting = false;
/** Draws once per frame at most, however often it is asked for. */
function paint() {
  if (painting) return;
  painting = true;
  requestAnimationFrame(() => {
    painting = false;
    if (state.at === null) return;
    const start = performance.now();
    showVerdict();
    machine.update(state);
    matrix.update(state);
    workloads.update(state);
    detail.update(state);
    performance.measure("numaward-update", { start });
  });
}

function theme() {
  const button = byId("theme");
  const stored = () => {
    // Storage may be forbidden; the choice then lasts as long as the page.
    try {
      return localStorage.getItem("theme");
    } catch {
      return null;
    }
  };
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = stored();
  const apply = () => {
    const dark = (chosen ?? (system.matches ? "dark" : "light")) === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    const other = dark ? "light" : "dark";
    button.textContent = other;
    button.setAttribute("aria-label", `Switch to ${other} colours`);
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("theme", chosen);
    } catch {
      // See above.
    }
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

theme();
goThere();
addEventListener("popstate", goThere);
attempt("machine", loadMachine);
attempt("events", loadEvents);
attempt("status", loadStatus);
setInterval(() => {
  if (!document.hidden) attempt("status", loadStatus);
}, STATUS);
follow({
  sample(sample) {
    const first = state.at === null || sample.full;
    if (state.sample(sample)) attempt("allocations", loadAllocations);
    if (first) attempt("past", loadPast);
    askWho();
    openWanted();
    paint();
  },
  event: take,
  missed: (count) => events.missed(count),
  state(link) {
    const text = link === "live" ? `live, up ${duration((state.at ?? 0) / 1000)}` : "not connected; what is shown is old";
    const line = byId("link");
    line.dataset.state = link;
    if (line.textContent !== text) line.textContent = text;
  },
});
