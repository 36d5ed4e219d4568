// Where one is on the page, as a part of its address that can be sent to others: `#/workloads/NAME?filter=…&sort=-size`.

/** What the address says. Other anchors, such as that of the skip link, are no place of ours. */
export function read() {
  const hash = location.hash;
  if (hash !== "" && !hash.startsWith("#/")) return null;
  const [path, query = ""] = hash.slice(1).split("?", 2);
  const values = new URLSearchParams(query);
  const [, kind = "", ...rest] = path.split("/");
  let workload = null;
  try {
    if (kind === "workloads" && rest.length > 0) workload = decodeURIComponent(rest.join("/"));
  } catch {
    // A "%" that somebody typed: the list is shown.
  }
  return {
    workload,
    status: kind === "status",
    filter: values.get("filter") ?? "",
    sort: values.get("sort"),
    guaranteed: values.get("promised") === "1",
  };
}

/** The address of a place. */
export function address({ workload = null, status = false, filter = "", sort = null, guaranteed = false }) {
  const values = new URLSearchParams();
  if (filter) values.set("filter", filter);
  if (sort) values.set("sort", sort);
  if (guaranteed) values.set("promised", "1");
  const path = status ? "status" : workload === null ? "" : `workloads/${encodeURIComponent(workload)}`;
  const query = values.toString();
  return `#/${path}${query ? `?${query}` : ""}`;
}

/** Goes to a place: as a step that Back takes back, or in the place of the one before. */
export function go(place, { step = false } = {}) {
  const to = address(place);
  if (to === location.hash || (to === "#/" && location.hash === "")) return;
  if (step) history.pushState(null, "", to);
  else history.replaceState(history.state, "", to);
}
