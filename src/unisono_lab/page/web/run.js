// The run as the server has told it so far.

export const KINDS = {
  lost: "lost", join: "joined", left: "left", resize: "resized", decision: "decisions", strategy: "strategy",
  topology: "topology", checkpoint: "checkpoints", healed: "healed", notice: "notices", run: "run",
};

const THINNED = 512; // groups that a table has at least, once it is thinned

export class Run {
  name = "";
  may = "look";
  head = null;
  rows = new Map(); // by name: marks and spans, as lists
  tables = new Map(); // by name: figures over steps
  finer = new Table(); // those of the range that is zoomed into
  events = []; // the newest first
  #marks = null;

  take(news) {
    if (news.name !== undefined) [this.name, this.may] = [news.name, news.may];
    if (news.anew) {
      this.rows.clear();
      this.tables.clear();
      this.finer = new Table();
      this.events = [];
    }
    this.head = news.head;
    this.#marks = null;
    for (const [name, { first, rows }] of Object.entries(news.rows)) {
      const known = this.rows.get(name) ?? [];
      this.rows.set(name, known.slice(0, first).concat(rows));
    }
    for (const [name, told] of Object.entries(news.curves)) {
      if (!this.tables.has(name)) this.tables.set(name, new Table());
      this.tables.get(name).take(told);
    }
    const events = news.events.map(([kind, time, until, step, many, title, figures]) => ({ kind, time, step, title, figures }));
    this.events = events.reverse().concat(this.events).slice(0, 60);
  }

  get(name) {
    return this.rows.get(name) ?? this.#tableOf(name)?.points(name) ?? [];
  }

  #tableOf(name) {
    return [...this.tables.values()].find((table) => table.values.has(name));
  }

  // The points of a curve, finer where somebody has zoomed in.
  curve(name) {
    const rows = this.get(name), finer = this.finer.points(name);
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
    return [...this.tables.values()].flatMap((table) => [...table.values.keys()]).filter((name) => name.startsWith(prefix));
  }

  get isThinned() {
    return [...this.tables.values()].some((table) => table.steps.length >= THINNED);
  }
}

// Figures by name, in groups of steps that they share.
export class Table {
  steps = [];
  times = [];
  values = new Map(); // by name: for each group nothing, a number, or the smallest value, the largest and the mean
  #points = new Map();

  take({ first, steps, times, values }) {
    this.#points.clear();
    this.steps = this.steps.slice(0, first).concat(steps);
    this.times = this.times.slice(0, first).concat(times);
    const nothing = (many) => Array(many).fill(null);
    for (const name of new Set([...this.values.keys(), ...Object.keys(values)]))
      this.values.set(name, (this.values.get(name) ?? nothing(first)).slice(0, first).concat(values[name] ?? nothing(steps.length)));
  }

  // Of one figure: step, time, smallest value, largest value, mean.
  points(name) {
    if (!this.#points.has(name)) this.#points.set(name, this.#pointsOf(this.values.get(name) ?? []));
    return this.#points.get(name);
  }

  #pointsOf(values) {
    return values.flatMap((value, group) => value === null ? [] : [[this.steps[group], this.times[group], ...(Array.isArray(value) ? value : [value, value, value])]]);
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
