// Events as they roll in, the latest first.

import { element } from "./format.js";

/** One event as a list item. */
export function eventItem(event) {
  const time = new Date(event.time);
  const about = [event.workload, event.node === undefined ? null : `node ${event.node}`].filter(Boolean).join(", ");
  const more = event.suppressed > 0 ? ` (${event.suppressed} more like it were not reported)` : "";
  return element(
    "li",
    { "data-severity": event.severity },
    element("time", { datetime: event.time, title: time.toLocaleString() }, time.toLocaleTimeString()),
    element("b", {}, event.kind.replaceAll("_", " ")),
    about ? ` ${about}: ` : ": ",
    `${event.message}${more}`,
  );
}

export class EventsView {
  constructor(root) {
    this.root = root;
    this.#say("nothing has happened yet");
  }

  add(event) {
    this.root.querySelector(".quiet")?.remove();
    this.root.prepend(eventItem(event));
    while (this.root.children.length > 200) this.root.lastElementChild.remove();
  }

  missed(count) {
    this.root.prepend(element("li", { class: "quiet" }, `${count} events came too fast to be shown; see api/v1/events`));
  }

  #say(text) {
    this.root.replaceChildren(element("li", { class: "quiet" }, text));
  }
}
