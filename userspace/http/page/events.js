// Events as they roll in, the latest first: a line each, the long text on demand.

import { address } from "./route.js";
import { element } from "./format.js";

/** One event as a list item. */
export function eventItem(event) {
  const time = new Date(event.time);
  const more = event.suppressed > 0 ? ` (${event.suppressed} more like it were not reported)` : "";
  const text = `${event.message}${more}`;
  const full = element("p", { hidden: true }, text);
  const line = element("button", { type: "button", class: "line", "aria-expanded": "false", title: "Show all of it" }, element("span", {}, text));
  line.addEventListener("click", () => {
    full.hidden = !full.hidden;
    line.setAttribute("aria-expanded", String(!full.hidden));
  });
  return element(
    "li",
    { "data-severity": event.severity },
    element("time", { datetime: event.time, title: time.toLocaleString() }, clock(time)),
    element("b", { class: "chip" }, event.kind.replaceAll("_", " ")),
    event.workload ? element("a", { href: address({ workload: event.workload }) }, event.workload) : null,
    event.node === undefined ? null : element("span", { class: "quiet" }, `node ${event.node}`),
    line,
    full,
  );
}

/** A time of day; one of another day has the date too. */
function clock(time) {
  const options = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
  if (time.toDateString() === new Date().toDateString()) return time.toLocaleTimeString([], options);
  return time.toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
}

export class EventsView {
  constructor(root) {
    this.root = root;
    this.#say("nothing has happened yet");
  }

  add(event) {
    this.root.querySelector(".quiet.alone")?.remove();
    this.root.prepend(eventItem(event));
    while (this.root.children.length > 200) this.root.lastElementChild.remove();
  }

  missed(count) {
    this.root.prepend(element("li", { class: "quiet" }, `${count} events came too fast to be shown; see api/v1/events`));
  }

  #say(text) {
    this.root.replaceChildren(element("li", { class: "quiet alone" }, text));
  }
}
