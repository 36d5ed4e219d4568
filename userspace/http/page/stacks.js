// Which code of a workload reaches across nodes: call chains as a flame graph that hangs from its root. The width of a
// function is its share of the bytes; a click on it makes it the root.

import { bytes, element, percent } from "./format.js";
import { fetchJson } from "./stream.js";

const KINDS = { allocations: "remote allocations", accesses: "remote accesses" };
/** What is narrower is not drawn, as a share of the root. */
const NARROWEST = 0.004;
/** Functions that call each other are drawn to this depth. */
const DEEPEST = 64;

/** A section that is read when it is opened, since that costs the daemon a look into the workload's files. */
export function code(workload) {
  const kind = { now: "allocations" };
  const chosen = element("fieldset", { class: "switch" }, element("legend", {}, "Code of"));
  const graph = element("div", { class: "flames" });
  const section = element("details", { class: "code" }, element("summary", {}, element("b", {}, "Which code reaches across nodes")), chosen, graph);
  let answer = null;
  const show = () => graph.replaceChildren(...(answer ? shown(answer, kind.now) : []));
  for (const [value, label] of Object.entries(KINDS)) {
    const input = element("input", { type: "radio", name: "code", value, checked: value === kind.now });
    input.addEventListener("change", () => {
      kind.now = value;
      show();
    });
    chosen.append(element("label", {}, input, ` ${label}`));
  }
  section.addEventListener("toggle", async () => {
    if (!section.open) return;
    graph.replaceChildren(element("p", { class: "quiet" }, "Reading…"));
    try {
      answer = await fetchJson(`api/v1/workloads/${encodeURIComponent(workload)}/stacks`);
      show();
    } catch (error) {
      answer = null;
      graph.replaceChildren(element("p", { class: "notice" }, error.message));
    }
  });
  return section;
}

function shown({ stacks, notes, lost }, kind) {
  const root = tree(stacks.filter((stack) => stack.kind === kind));
  const said = notes.map((note) => element("p", { class: "quiet" }, `${note}.`));
  if (lost > 0) said.push(element("p", { class: "quiet" }, `Chains of all workloads found no room ${lost} times.`));
  if (root.bytes === 0) return [element("p", { class: "quiet" }, "Nothing that was sampled reached across nodes."), ...said];
  const drawn = element("div");
  const draw = (node) => drawn.replaceChildren(...graphOf(node, root, draw));
  draw(root);
  return [drawn, ...said];
}

/** The chains by what they have in common. */
function tree(stacks) {
  const root = { name: "all", bytes: 0, callees: new Map() };
  for (const stack of stacks) {
    let node = root;
    node.bytes += stack.bytes;
    for (const name of stack.frames) {
      if (!node.callees.has(name)) node.callees.set(name, { name, bytes: 0, callees: new Map() });
      node = node.callees.get(name);
      node.bytes += stack.bytes;
    }
  }
  return root;
}

function graphOf(node, root, draw) {
  const back = node === root ? null : element("button", { type: "button", class: "back" }, "Show all");
  back?.addEventListener("click", () => draw(root));
  return [back, frame(node, node, root, draw, 0)].filter(Boolean);
}

function frame(node, top, root, draw, depth) {
  const text = `${node.name}: ${bytes(node.bytes)}, ${percent(node.bytes / root.bytes)}`;
  const button = element("button", { type: "button", title: text, "aria-label": text, "data-kernel": node.name.endsWith("_[k]") }, node.name);
  button.addEventListener("click", () => draw(node));
  const callees = [...node.callees.values()].filter((callee) => callee.bytes / top.bytes >= NARROWEST);
  callees.sort((a, b) => b.bytes - a.bytes);
  const below = depth < DEEPEST ? callees.map((callee) => {
    const made = frame(callee, top, root, draw, depth + 1);
    made.style.width = `${(callee.bytes / node.bytes) * 100}%`;
    return made;
  }) : [];
  return element("div", { class: "flame" }, button, below.length > 0 ? element("div", { class: "callees" }, below) : null);
}
