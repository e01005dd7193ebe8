// The run as the server has told it so far.

export const KINDS = {
  lost: "lost", join: "joined", left: "left", resize: "resized", decision: "decisions", strategy: "strategy",
  topology: "topology", checkpoint: "checkpoints", healed: "healed", notice: "notices", run: "run",
};

export class Run {
  name = "";
  may = "look";
  head = null;
  rows = new Map(); // by name: points of curves, marks and spans, as lists
  finer = {}; // by name: points of the range that is zoomed into
  events = []; // the newest first
  #marks = null;

  take(news) {
    if (news.name !== undefined) [this.name, this.may] = [news.name, news.may];
    if (news.anew) {
      this.rows.clear();
      this.finer = {};
      this.events = [];
    }
    this.head = news.head;
    this.#marks = null;
    for (const [name, { first, rows }] of Object.entries(news.rows)) {
      const known = this.rows.get(name) ?? [];
      this.rows.set(name, known.slice(0, first).concat(rows));
    }
    const events = news.events.map(([kind, time, until, step, many, title, figures]) => ({ kind, time, step, title, figures }));
    this.events = events.reverse().concat(this.events).slice(0, 60);
  }

  get(name) {
    return this.rows.get(name) ?? [];
  }

  // The points of a curve, finer where somebody has zoomed in.
  curve(name) {
    const rows = this.get(name), finer = this.finer[name] ?? [];
    if (!finer.length) return rows;
    const [from, until] = [finer[0][0], finer.at(-1)[0]];
    return [...rows.filter((row) => row[0] < from), ...finer, ...rows.filter((row) => row[0] > until)];
  }

  // Marks of events that name no step are where the loss was by then.
  get marks() {
    return (this.#marks ??= this.#placed());
  }

  #placed() {
    const loss = this.get("loss"), stepAt = (time) => loss.findLast((row) => row[1] !== null && row[1] <= time)?.[0] ?? null;
    return Object.keys(KINDS).flatMap((kind) =>
      this.get(`marks/${kind}`).map(([time, until, step, many, title, figures]) => ({ kind, time, until, step: step ?? stepAt(until), many, title, figures })));
  }

  names(prefix) {
    return [...this.rows.keys()].filter((name) => name.startsWith(prefix));
  }
}

export function element(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children); // text stays text
  return found;
}

export function svg(tag, attributes = {}, ...children) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children);
  return found;
}

export function figure(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value <= 0) return "0";
  if (value < 1e-3) return `${(1e6 * value).toFixed(0)} µs`;
  if (value < 1) return `${figure(1e3 * value, 3)} ms`;
  if (value < 120) return `${figure(value, 3)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${figure(value / 3600, 3)} h`;
}

export function clock(time) {
  return new Date(1000 * time).toLocaleTimeString("en-GB");
}
