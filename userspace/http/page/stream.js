// The daemon's figures: fetched once, then streamed. A connection that is lost is made again, less and less often.

const LONGEST_PAUSE = 15_000;
/** Samples come each second; without one for so long what is shown is old. */
const STALE = 5_000;

/** Fetches JSON; an error says which resource, and what the daemon said. */
export async function fetchJson(path) {
  const response = await fetch(path, { headers: { accept: "application/json" } });
  if (!response.ok) {
    const problem = await response.json().catch(() => ({}));
    throw new Error(`${path}: ${problem.detail ?? response.statusText}`);
  }
  return response.json();
}

/** Calls `on.sample`, `on.event`, `on.missed` and `on.state` ("live", "stale") until the page is left. */
export function follow(on) {
  let pause = 500;
  let stale = null;
  let lastEvent = null;
  const open = () => {
    const since = lastEvent === null ? "" : `&since=${lastEvent}`;
    const source = new EventSource(`api/v1/stream?samples=true${since}`);
    const alive = () => {
      pause = 500;
      clearTimeout(stale);
      stale = setTimeout(() => on.state("stale"), STALE);
      on.state("live");
    };
    source.addEventListener("sample", (message) => {
      on.sample(JSON.parse(message.data));
      alive();
    });
    source.addEventListener("message", (message) => {
      lastEvent = message.lastEventId;
      on.event(JSON.parse(message.data));
    });
    source.addEventListener("missed", (message) => on.missed(JSON.parse(message.data).missed));
    source.addEventListener("error", () => {
      // The browser's own attempts are too eager for a daemon that is down.
      source.close();
      on.state("stale");
      setTimeout(open, pause);
      pause = Math.min(pause * 2, LONGEST_PAUSE);
    });
  };
  open();
}
