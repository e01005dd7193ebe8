// Generations over time, as high as they have workers, with a lane of marks for each kind of event.

import { KINDS, clock, seconds, svg } from "./run.js";
import { aboutMark, hideTip, showTip } from "./tip.js";

const HIGH = 64, LANE = 20, LEFT = 86, RIGHT = 12, TOP = 14;

export function shape(kind) {
  const fill = { fill: "currentColor" }, line = { fill: "none", stroke: "currentColor", "stroke-width": 2 };
  switch (kind) {
    case "lost": return svg("path", { ...line, d: "M-4-4 4 4M4-4-4 4", "stroke-linecap": "round" });
    case "join": return svg("path", { ...line, d: "M0-5V5M-5 0H5", "stroke-linecap": "round" });
    case "left": return svg("path", { ...line, d: "M-5 0H5", "stroke-linecap": "round" });
    case "resize": return svg("path", { ...fill, d: "M0-6 5 0 0 6-5 0Z" });
    case "decision": return svg("circle", { ...fill, r: 4 });
    case "strategy": return svg("path", { ...fill, d: "M0-5 5 4H-5Z" });
    case "topology": return svg("path", { ...fill, d: "M0 5 5-4H-5Z" });
    case "checkpoint": return svg("rect", { ...fill, x: -4, y: -4, width: 8, height: 8, rx: 1.5 });
    case "healed": return svg("path", { ...fill, d: "M-2-5H2V-2H5V2H2V5H-2V2H-5V-2H-2Z" });
    case "notice": return svg("path", { ...line, d: "M0-5V1M0 4.5V5", "stroke-linecap": "round", "stroke-width": 2.6 });
    default: return svg("circle", { ...line, r: 3.5 });
  }
}

export class Ribbon {
  #place;
  #drawn = "";

  constructor(place) {
    this.#place = place;
    place.addEventListener("keydown", (event) => this.#step(event));
    for (const kind of ["pointerover", "focusin"]) place.addEventListener(kind, (event) => this.#point(event.target));
    for (const kind of ["pointerout", "focusout"]) place.addEventListener(kind, hideTip);
  }

  draw(run, now) {
    const spans = run.get("spans"), marks = run.marks, width = this.#place.clientWidth;
    const from = Math.min(...spans.slice(0, 1).map((span) => span[0]), ...marks.map((mark) => mark.time));
    if (!Number.isFinite(from) || width < 50) return;
    const until = Math.max(now, from + 1), kinds = Object.keys(KINDS).filter((kind) => run.get(`marks/${kind}`).length);
    const rough = JSON.stringify([width, spans, marks.map((mark) => [mark.time, mark.many])]);
    const scale = (until - from) / (width - LEFT - RIGHT); // seconds per pixel
    const key = `${rough}${Math.round(until / Math.max(scale, 0.5))}`;
    if (key === this.#drawn) return; // nothing moves by a pixel
    this.#drawn = key;
    const x = (time) => LEFT + (time - from) / scale;
    const height = TOP + HIGH + 8 + kinds.length * LANE + 20;
    const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Generations over time" });
    this.#spans(drawing, spans, x, until, width);
    kinds.forEach((kind, lane) => this.#lane(drawing, kind, TOP + HIGH + 8 + lane * LANE + LANE / 2, marks, x, width));
    for (const [at, anchor] of [[from, "start"], [(from + until) / 2, "middle"], [until, "end"]])
      drawing.append(svg("text", { x: x(at), y: height - 4, "text-anchor": anchor }, clock(at)));
    const focused = this.#place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.#place.replaceChildren(drawing);
    if (focused) this.#place.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  #spans(drawing, spans, x, until, width) {
    const most = Math.max(1, ...spans.map((span) => span[2])), base = TOP + HIGH;
    drawing.append(svg("text", { x: 0, y: base - 2 }, "workers"));
    for (const level of new Set([most, Math.ceil(most / 2)])) {
      const y = base - (HIGH * level) / most;
      drawing.append(svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, String(level)));
      drawing.append(svg("line", { class: "lane", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    }
    spans.forEach(([time, number, workers, stall, parts, many], at) => {
      const right = x(spans[at + 1]?.[0] ?? until), left = x(time), high = (HIGH * workers) / most;
      const name = many > 1 ? `generations up to ${number} (${many})` : `generation ${number}`;
      const block = svg("g", { class: "mark", tabindex: at === spans.length - 1 ? 0 : -1, role: "img", "data-key": `span-${number}`, "aria-label": `${name}: ${workers} workers` });
      block.append(svg("rect", { class: "ring", x: left, y: base - high, width: Math.max(1.5, right - left), height: high }));
      block.append(svg("rect", { x: left, y: base - high, width: Math.max(1.5, right - left - 1), height: high, rx: 3, fill: `var(--span-${number % 2 ? "a" : "b"})` }));
      if (stall > 0)
        block.append(svg("rect", { x: left, y: base - high, width: Math.max(2, Math.min(x(time + stall), right) - left), height: high, fill: "var(--stall)", class: "stall" }));
      if (right - left > 26) block.append(svg("text", { x: Math.max(left, Math.min(x(time + stall), right - 20)) + 7, y: base - 7, fill: "var(--text)" }, String(workers)));
      block.about = [`${name}: ${workers} workers`, { from: clock(time), ...(stall > 0 ? { "stood still": seconds(stall) } : {}), ...Object.fromEntries(Object.entries(parts).map(([part, took]) => [part, seconds(took)])) }];
      drawing.append(block);
    });
  }

  #lane(drawing, kind, y, marks, x, width) {
    drawing.append(svg("text", { x: 0, y: y + 4 }, KINDS[kind]), svg("line", { class: "lane", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    const own = marks.filter((mark) => mark.kind === kind);
    own.forEach((mark, at) => {
      const place = svg("g", { class: `mark kind-${kind}`, transform: `translate(${x(mark.time).toFixed(1)} ${y})`, tabindex: at === own.length - 1 ? 0 : -1, role: "img", "data-key": `${kind}-${at}`, "aria-label": `${mark.title}, ${clock(mark.time)}` });
      place.append(svg("circle", { class: "ring", r: 9 }), shape(kind));
      place.about = [mark.title, aboutMark(mark)];
      drawing.append(place);
    });
  }

  #point(target) {
    const mark = target.closest?.(".mark");
    if (mark) showTip(mark, ...mark.about);
  }

  // One tab stop per lane; arrows go along it.
  #step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], mark = event.target.closest(".mark");
    if (!by || !mark) return;
    const lane = mark.dataset.key.replace(/-[^-]*$/, "-"), all = [...this.#place.querySelectorAll(`[data-key^="${CSS.escape(lane)}"]`)];
    all[all.indexOf(mark) + by]?.focus();
    event.preventDefault();
  }
}
