// The curves, each in a card of its own.

import uPlot from "./uPlot.esm.js";
import { element, figure, seconds, svg } from "./run.js";

const HUES = 8;
const DASHES = [[], [7, 3], [2, 3], [10, 3, 2, 3], [4, 4], [1, 2], [12, 4], [6, 2, 2, 2, 2, 2]]; // besides hues, which not everybody sees
const SHOWN_MARKS = ["lost", "join", "left", "resize", "strategy", "topology", "healed"];

function plan(run) {
  const one = (id, title, curve, format = figure) => ({ id, title, curves: [[curve, title]], format });
  const found = [one("loss", "Loss", "loss")];
  for (const name of run.names("metric/")) found.push(one(name, name.slice(7), name));
  found.push({ ...one("throughput", "Samples per second", "samples_per_s"), cuts: true });
  found.push({ id: "seconds", cuts: true, title: "Seconds of a step", format: seconds, curves: [["seconds/compute", "computing"], ["seconds/exposed_communication", "exposed communication"], ["seconds/data", "data"], ["seconds/update", "update"]] });
  found.push({ id: "shards", cuts: true, title: "Seconds per shard", format: seconds, curves: run.names("shard_s/").map((name) => [name, `rank ${name.slice(8)}`]) });
  found.push(one("lr", "Learning rate", "lr"), one("batch", "Batch size", "batch_size"), one("noise", "Noise scale", "noise_scale"), one("norm", "Gradient norm", "gradient_norm"));
  found.push(one("sharpness", "Critical sharpness", "critical_sharpness"), one("step", "Critical step", "critical_step"), one("eigenvalue", "Largest eigenvalue", "largest_eigenvalue"), one("trace", "Trace of the Hessian", "hessian_trace"), one("confidence", "Confidence, mean of layers", "confidence"));
  for (const name of run.names("observed/")) found.push(one(name, `Observed: ${name.slice(9)}`, name));
  return found.filter(({ curves }) => curves.some(([name]) => run.get(name).length));
}

export class Plots {
  overTime = false;
  dragged = null; // the card in which somebody selects a range
  #place;
  #cards = new Map();
  #zoom = null;
  #refine;
  #hidden = new Set();

  // ``refine`` is told which range of which axis somebody looks at; null for all of it.
  constructor(place, refine) {
    this.#place = place;
    this.#refine = refine;
    new ResizeObserver(() => this.#cards.forEach((card) => card.fit())).observe(place);
  }

  draw(run) {
    const wanted = plan(run);
    for (const [id, card] of this.#cards) if (!wanted.some((one) => one.id === id)) card.remove(), this.#cards.delete(id);
    for (const one of wanted) {
      if (!this.#cards.has(one.id)) this.#cards.set(one.id, new Card(one, this));
      this.#cards.get(one.id).draw(run, one);
    }
    const order = wanted.map((one) => this.#cards.get(one.id).card), now = [...this.#place.children];
    if (order.some((card, at) => card !== now[at])) this.#place.replaceChildren(...order);
  }

  again(run) {
    this.#cards.forEach((card) => card.remove());
    this.#cards.clear();
    this.zoom = null;
    this.draw(run);
  }

  // Curves that somebody does not want to see, by name.
  get hidden() {
    return this.#hidden;
  }

  get zoom() {
    return this.#zoom;
  }

  set zoom(range) {
    this.#zoom = range;
    this.#cards.forEach((card) => card.show());
    this.#refine(this.overTime ? "time" : "step", range);
  }

  // About a place, by a factor: below 1 it goes in, above 1 out.
  zoomBy(factor, about, { min, max, first, last }) {
    const [low, high] = [Math.max(first, about - factor * (about - min)), Math.min(last, about + factor * (max - about))];
    const isAll = low <= first && high >= last;
    this.zoom = isAll || high <= low ? null : { min: low, max: high };
  }
}

// How high a plot of times is drawn: a few steps that took many times as long would hide all others.
function usual(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b), most = sorted.at(-1) ?? Infinity;
  const limit = 2 * (sorted[Math.floor(0.97 * sorted.length)] ?? Infinity);
  return most > 1.5 * limit && limit > 0 ? limit : Infinity;
}

class Card {
  #plots;
  #plot = null;
  #shape = "";
  #data = null;
  #marks = [];
  #format = figure;
  #most = Infinity;
  #about = null; // where somebody has pointed
  #canvas = element("div", { class: "canvas", tabindex: 0, role: "img" });
  #value = element("span", { class: "value" });
  #legend = element("div", { class: "legend" });

  constructor({ id, title }, plots) {
    this.#plots = plots;
    const zooming = element("span", { class: "zooming" }, ...[["+", 0.5, "Zoom in"], ["−", 2, "Zoom out"]].map(([sign, factor, label]) => {
      const button = element("button", { type: "button", "aria-label": `${label}: ${title}`, tabindex: -1 }, sign); // by keyboard, + and - do it
      button.addEventListener("click", () => this.#zoomBy(factor));
      return button;
    }));
    this.card = element("figure", { class: "card plot", "data-plot": id }, element("div", { class: "top" }, element("h3", { title }, title), this.#value, zooming), this.#legend, this.#canvas);
    this.#canvas.addEventListener("keydown", (event) => this.#key(event));
    this.#canvas.addEventListener("blur", () => this.#plot?.setCursor({ left: -10, top: -10 }));
  }

  draw(run, { title, curves, format, cuts }) {
    const at = this.#plots.overTime ? 1 : 0, known = curves.filter(([name]) => run.get(name).length);
    const rows = known.map(([name]) => run.curve(name).filter((row) => row[at] !== null));
    this.#format = format;
    this.#most = cuts ? usual(rows.flatMap((each) => each.map((row) => row[4]))) : Infinity;
    this.#marks = run.marks.filter((mark) => SHOWN_MARKS.includes(mark.kind)).map((mark) => ({ kind: mark.kind, x: at ? mark.time : mark.step })).filter((mark) => mark.x !== null);
    const single = rows.length === 1;
    this.#data = single ? [rows[0].map((row) => row[at]), ...[4, 2, 3].map((field) => rows[0].map((row) => row[field]))] : uPlot.join(rows.map((each) => [each.map((row) => row[at]), each.map((row) => row[4])]));
    const shape = JSON.stringify([known.map(([name]) => name), at]);
    if (shape !== this.#shape) this.#make(known, single, at);
    this.#shape = shape;
    this.#legend.hidden = single;
    this.show();
    const newest = rows.map((each) => each.at(-1)?.[4]);
    this.#canvas.setAttribute("aria-label", `${title}: ${known.map(([, label], index) => `${single ? "" : label + " "}${format(newest[index])}`).join(", ")}. Arrow keys move along it, plus and minus zoom.`);
    if (single) this.#say(newest[0]);
  }

  show() {
    if (!this.#plot) return;
    const zoom = this.#plots.zoom;
    this.#plot.batch(() => {
      this.#plot.setData(this.#data, zoom === null);
      if (zoom) this.#plot.setScale("x", zoom);
    });
    this.#canvas.dataset.points = this.#data[0].length;
  }

  fit() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    if (this.#plot && width && (width !== this.#plot.width || height !== this.#plot.height)) this.#plot.setSize({ width, height });
  }

  remove() {
    this.#plot?.destroy();
    this.card.remove();
  }

  #say(value, x) {
    this.#value.replaceChildren(element("b", {}, this.#format(value)), ...(x === undefined ? [] : [` at ${this.#where(x)}`]));
  }

  #where(x) {
    return this.#plots.overTime ? new Date(1000 * x).toLocaleTimeString("en-GB") : `step ${x.toLocaleString("en")}`;
  }

  #make(known, single, overTime) {
    this.#plot?.destroy();
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const hue = (index) => colour(`c${index % HUES}`);
    const dash = (index) => DASHES[index % HUES];
    const lines = known.map(([name, label], index) => ({ label, show: !this.#plots.hidden.has(name), stroke: hue(index), dash: dash(index).map((length) => length * devicePixelRatio), width: 1.75, spanGaps: true, points: { show: false } }));
    const hidden = { stroke: "transparent", width: 0, points: { show: false } };
    this.#legend.replaceChildren(...known.map(([name, label], index) => {
      const sample = svg("svg", { width: 24, height: 8, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 24, y1: 4, y2: 4, stroke: hue(index), "stroke-width": 2.5, "stroke-dasharray": dash(index).join(" ") }));
      const item = element("button", { type: "button", "aria-pressed": String(!this.#plots.hidden.has(name)), title: "Show or hide this curve" }, sample, label);
      item.addEventListener("click", () => this.#toggle(name, index, item));
      return item;
    }));
    const format = this.#format;
    this.#plot = new uPlot({
      width: this.#canvas.clientWidth || 400, height: this.#canvas.clientHeight || 190,
      legend: { show: false },
      scales: { x: { time: Boolean(overTime) }, y: { range: (plot, low, high) => (low === null ? [0, 1] : uPlot.rangeNum(low, Math.min(high, Math.max(this.#most, low * 1.01)), { min: { pad: 0.1, soft: 0, mode: 3 }, max: { pad: 0.1, soft: 0, mode: 3 } })) } },
      series: [{}, ...lines, ...(single ? [{ ...hidden }, { ...hidden }] : [])],
      bands: single ? [{ series: [3, 2], fill: `color-mix(in srgb, ${hue(0)} 18%, transparent)` }] : [],
      axes: [{ ...axis, space: 60, size: 26, ...(overTime ? {} : { values: (plot, splits) => splits.map((split) => (Number.isInteger(split) ? (split >= 1e5 ? `${figure(split / 1e3, 6)}k` : split.toLocaleString("en")) : "")) }) }, { ...axis, size: 58, values: (plot, splits) => splits.map((split) => (split === null ? "" : format(split))) }],
      cursor: { sync: { key: "plots", setSeries: false }, points: { size: 7 }, drag: { x: true, y: false, setScale: false } },
      hooks: {
        setCursor: [(plot) => this.#pointed(plot)],
        setSelect: [(plot) => this.#selected(plot)],
        drawClear: [(plot) => this.#drawMarks(plot, colour)],
        ready: [(plot) => {
          plot.over.addEventListener("mousedown", () => { this.#plots.dragged = this; });
          plot.over.addEventListener("dblclick", () => { this.#plots.zoom = null; });
        }],
      },
    }, this.#data, this.#canvas);
  }

  #toggle(name, index, item) {
    const { hidden } = this.#plots;
    if (!hidden.delete(name)) hidden.add(name);
    item.setAttribute("aria-pressed", String(!hidden.has(name)));
    this.#plot.setSeries(index + 1, { show: !hidden.has(name) });
  }

  #zoomBy(factor) {
    const { min, max } = this.#plot.scales.x, first = this.#data[0][0], last = this.#data[0].at(-1);
    this.#plots.zoomBy(factor, Math.min(max, Math.max(min, this.#about ?? last)), { min, max, first, last });
  }

  #pointed(plot) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined || plot.cursor.left < 0) {
      const row = this.#data?.[1];
      if (this.#legend.hidden && row) this.#say(row[row.length - 1]);
      else this.#value.replaceChildren();
      return;
    }
    const x = this.#data[0][at];
    this.#about = x;
    if (this.#legend.hidden) this.#say(this.#data[1][at], x);
    else {
      const told = [...this.#legend.children].map((item, index) => [item.textContent, this.#data[index + 1][at]]).filter(([, value]) => value !== null && value !== undefined);
      this.#value.replaceChildren(told.map(([, value]) => this.#format(value)).join(" · "), ` at ${this.#where(x)}`);
    }
  }

  #selected(plot) {
    const { left, width } = plot.select;
    if (width > 4 && this.#plots.dragged === this) // the others show the same selection
      this.#plots.zoom = { min: plot.posToVal(left, "x"), max: plot.posToVal(left + width, "x") };
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  #drawMarks(plot, colour) {
    const { ctx, bbox } = plot, hues = { lost: "c3", join: "c2", left: "c7", resize: "c0", strategy: "c1", topology: "c4", healed: "c6" };
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.globalAlpha = 0.55;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { kind, x } of this.#marks) {
      const left = plot.valToPos(x, "x", true);
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour(hues[kind]);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  #key(event) {
    const plot = this.#plot, last = this.#data[0].length - 1, by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -Math.ceil(last / 10), PageDown: Math.ceil(last / 10), Home: -last, End: last }[event.key];
    if (event.key === "Escape") this.#plots.zoom = null;
    if (["+", "=", "-"].includes(event.key)) return this.#zoomBy(event.key === "-" ? 2 : 0.5);
    if (by === undefined) return;
    const at = Math.min(last, Math.max(0, (plot.cursor.idx ?? last) + by));
    plot.setCursor({ left: plot.valToPos(this.#data[0][at], "x"), top: plot.over.clientHeight / 2 });
    event.preventDefault();
  }
}
