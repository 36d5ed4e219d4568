// Puts the page together.

import { DetailView } from "./detail.js";
import { EventsView } from "./events.js";
import { duration, element, list } from "./format.js";
import { MachineView } from "./machine.js";
import { MatrixView } from "./matrix.js";
import { State } from "./state.js";
import { fetchJson, follow } from "./stream.js";
import { WorkloadsView } from "./workloads.js";

const byId = (id) => document.getElementById(id);
const state = new State();

const machine = new MachineView(byId("machine"), byId("legend"));
const matrix = new MatrixView(byId("matrix"), byId("matrix-kind"), () => matrix.update(state));
const events = new EventsView(byId("events"));
const detail = new DetailView(byId("detail"), byId("detail-title"), byId("detail-body"), byId("close"));
const workloads = new WorkloadsView({
  box: byId("table"),
  head: byId("head"),
  body: byId("rows"),
  count: byId("count"),
  filter: byId("filter"),
  promisedOnly: byId("promised-only"),
  open: (key) => detail.open(state, key),
});

/** Says what is wrong until it is right again. */
const notices = new Map();
function notice(topic, text) {
  if (notices.get(topic) === text) return;
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
  byId("host").textContent = `${state.version.version} on Linux ${state.version.kernel}`;
}

async function loadAllocations() {
  const fetched = await fetchJson("api/v1/allocations");
  for (const allocation of fetched.allocations) allocation.nodeNumbers = list(allocation.nodes);
  state.promise(fetched);
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

let painting = false;
/** Draws once per frame at most, however often it is asked for. */
function paint() {
  if (painting) return;
  painting = true;
  requestAnimationFrame(() => {
    painting = false;
    const start = performance.now();
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
    button.setAttribute("aria-pressed", String(dark));
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
attempt("machine", loadMachine);
attempt("events", loadEvents);
follow({
  sample(sample) {
    if (state.sample(sample)) attempt("allocations", loadAllocations);
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
