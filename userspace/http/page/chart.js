// Lines over time: small ones in rows and cards, large ones with axes.

import { element } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/** Rates of the last ten minutes in buckets of ten seconds. */
export class Trend {
  static STEP = 10_000;
  static COUNT = 60;
  /** Oldest first: by the number of the bucket, how much in all. */
  #buckets = new Map();
  /** How often the past was taken in. */
  version = 0;

  /** What was before, from the daemon's history: means by step, the last of which ended at `end`. */
  before(end, step, local, remote) {
    this.version += 1;
    const own = this.#buckets;
    this.#buckets = new Map();
    local.forEach((value, index) => {
      if (value === null) return;
      const from = end - (local.length - index) * step * 1000;
      this.#spread(from, from + step * 1000, value, remote[index] ?? 0);
    });
    const last = Math.floor((end - 1) / Trend.STEP);
    for (const [bucket, sums] of own) if (bucket > last || !this.#buckets.has(bucket)) this.#buckets.set(bucket, sums);
  }

  /** Rates that held for the last `seconds`. */
  add(at, local, remote, seconds) {
    if (seconds > 0) this.#add(at, local, remote, seconds);
    const oldest = Math.floor(at / Trend.STEP) - Trend.COUNT;
    for (const bucket of this.#buckets.keys()) if (bucket <= oldest) this.#buckets.delete(bucket);
  }

  /** A step of the past need not begin with a bucket: each gets its part. */
  #spread(from, to, local, remote) {
    for (let at = from; at < to;) {
      const end = Math.min(to, (Math.floor(at / Trend.STEP) + 1) * Trend.STEP);
      this.#add(at, local, remote, (end - at) / 1000);
      at = end;
    }
  }

  #add(at, local, remote, seconds) {
    const bucket = Math.floor(at / Trend.STEP);
    const sums = this.#buckets.get(bucket) ?? { local: 0, remote: 0, seconds: 0 };
    sums.local += local * seconds;
    sums.remote += remote * seconds;
    sums.seconds += seconds;
    this.#buckets.set(bucket, sums);
  }

  /** Means by bucket that is over, oldest first; null where nothing is known. */
  points(now) {
    const last = Math.floor(now / Trend.STEP) - 1;
    return Array.from({ length: Trend.COUNT }, (_, index) => {
      const sums = this.#buckets.get(last - Trend.COUNT + 1 + index);
      return sums ? { local: sums.local / sums.seconds, remote: sums.remote / sums.seconds } : null;
    });
  }
}

/** Rates of late: means over the last five seconds. */
export class Recent {
  static SPAN = 5_000;
  /** Oldest first: from when until when, and the rates by name. */
  #parts = [];

  /** Rates that held for the last `seconds`. */
  add(at, rates, seconds) {
    if (!(seconds > 0)) return;
    this.#parts.push({ from: at - seconds * 1000, to: at, rates });
    while (this.#parts[0].to <= at - Recent.SPAN) this.#parts.shift();
  }

  /** Rates of the `seconds` that ended at `end`, from the daemon's history: they count for the time before that which is known. */
  before(end, seconds, rates) {
    const from = end - seconds * 1000;
    const to = Math.min(end, this.#parts[0]?.from ?? Infinity);
    if (to > from) this.#parts.unshift({ from, to, rates });
  }

  /** The means; NaN of what is not known. */
  means(at) {
    const mean = (name) => {
      let [sum, length] = [0, 0];
      for (const { from, to, rates } of this.#parts) {
        const part = to - Math.max(from, at - Recent.SPAN);
        if (part <= 0 || !Number.isFinite(rates[name])) continue;
        sum += rates[name] * part;
        length += part;
      }
      return length > 0 ? sum / length : NaN;
    };
    return { local: mean("local"), remote: mean("remote"), missed: mean("missed") };
  }
}

/** A small chart of local and remote rates. The element is made once and drawn anew when a bucket is over. */
export class Sparkline {
  #drawn = null;

  constructor(width, height) {
    Object.assign(this, { width, height });
    this.element = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": "no past yet" });
  }

  draw(key, trend, now, text) {
    const drawn = `${key} ${Math.floor(now / Trend.STEP)} ${trend.version}`;
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    const points = trend.points(now);
    const most = Math.max(1, ...points.map((point) => (point ? Math.max(point.local, point.remote) : 0)));
    const x = (index) => (index / (points.length - 1)) * this.width;
    const y = (value) => this.height - 1 - (value / most) * (this.height - 2);
    const lines = ["local", "remote"].flatMap((name) => paths(points.map((point) => point?.[name] ?? null), x, y).map((d) => svg("path", { class: name, d })));
    this.element.replaceChildren(...lines);
    this.element.setAttribute("aria-label", `last ten minutes: ${text(most, points.some((point) => point))}`);
  }
}

/** Lines through what is known; a point alone is a short line. */
function paths(values, x, y) {
  const made = [];
  let line = [];
  const end = () => {
    if (line.length === 1) line.push(line[0].replace("M", "h").replace(/ .*/, ""));
    if (line.length > 0) made.push(line.length === 2 && line[1].startsWith("h") ? `${line[0]}h1` : line.join(""));
    line = [];
  };
  values.forEach((value, index) => {
    if (value === null || value === undefined || Number.isNaN(value)) return end();
    line.push(`${line.length === 0 ? "M" : "L"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`);
    return undefined;
  });
  end();
  return made;
}

/** A round number of at least `value`, in binary units, and how many parts look well. */
function scale(value) {
  let unit = 1;
  while (value / unit >= 1024) unit *= 1024;
  const steps = [1, 2, 4, 5, 8, 10, 20, 40, 50, 100, 200, 250, 400, 500, 800, 1024];
  const top = (steps.find((step) => step * unit >= value) ?? 1024) * unit;
  return [0, top / 2, top];
}

/**
 * A chart with axes. `series` are `{ name, points: [{ at, value }] }` in milliseconds of the daemon's clock; `clock` makes
 * a time of day of these; `format` writes values.
 */
export function chart({ title, series, from, to, clock, format, width }) {
  const [left, right, top, bottom, height] = [78, 8, 8, 22, 150];
  const values = series.flatMap(({ points }) => points.map(({ value }) => value)).filter((value) => value !== null && !Number.isNaN(value));
  const ticks = scale(Math.max(1, ...values));
  const most = ticks.at(-1);
  const x = (at) => left + ((at - from) / (to - from)) * (width - left - right);
  const y = (value) => height - bottom - (value / most) * (height - top - bottom);
  const parts = ticks.flatMap((tick) => [
    svg("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
    svg("text", { class: "tick", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)),
  ]);
  const count = width < 500 ? 2 : 5;
  for (let index = 0; index <= count; index += 1) {
    const at = from + ((to - from) * index) / count;
    const anchor = index === 0 ? "start" : index === count ? "end" : "middle";
    parts.push(svg("text", { class: "tick", x: x(at), y: height - 5, "text-anchor": anchor }, index === count ? "now" : clock(at)));
  }
  for (const { name, points, gap } of series) {
    // A line does not bridge what is not known.
    const broken = [];
    points.forEach((point, index) => {
      if (index > 0 && point.at - points[index - 1].at > gap) broken.push({ at: point.at, value: null });
      broken.push(point);
    });
    for (const d of paths(broken.map(({ value }) => value), (index) => x(broken[index].at), y)) parts.push(svg("path", { class: name, d }));
  }
  const summary = series.map(({ name, points }) => {
    const known = points.map(({ value }) => value).filter((value) => value !== null);
    return known.length > 0 ? `${name} at most ${format(Math.max(...known))}, now ${format(known.at(-1))}` : `${name} is not known`;
  });
  const drawing = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${summary.join("; ")}` }, ...parts);
  const legend = element("ul", { class: "legend" }, series.map(({ name, label }, index) => (
    element("li", { style: `--swatch: var(--${name})` }, `${label}: ${summary[index].replace(`${name} `, "")}`)
  )));
  return element("figure", { class: "history" }, element("figcaption", {}, title), drawing, legend);
}
