// Who trains: each worker with the shards that it computes, as cells that move when the split changes.

import { element, seconds } from "./run.js";

const MANY = 64, MOST_CELLS = 512;

export class Workers {
  #place;
  #rows = new Map();

  constructor(place, ask) {
    this.#place = place;
    place.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-verb]");
      if (button) ask(button.dataset.verb, button.dataset.who);
    });
  }

  draw(run, canAsk) {
    const workers = run.head.workers, before = this.#positions();
    const slowest = Math.max(...workers.map((one) => one.shard_s ?? 0), 1e-9);
    const total = workers.reduce((sum, one) => sum + one.shards, 0);
    const rows = new Map();
    let first = 0;
    for (const one of workers) {
      const row = this.#rows.get(one.id) ?? this.#row(one);
      rows.set(one.id, row);
      this.#fill(row, one, { first, total, slowest, canAsk });
      first += one.shards;
    }
    this.#rows = rows;
    const wanted = [...rows.values()].map((row) => row.line);
    const known = [...this.#place.children];
    if (wanted.length !== known.length || wanted.some((line, at) => line !== known[at])) this.#place.replaceChildren(...wanted);
    this.#move(before);
  }

  #row(one) {
    const name = element("b"), about = element("span"), cells = element("div", { class: "cells" });
    const words = element("span"), fill = element("i"), bar = element("div", { class: "bar" }, fill);
    const buttons = element("div", { class: "do" });
    for (const [verb, label] of [["leave", "Leave…"], ["replace", "Replace…"]])
      buttons.append(element("button", { type: "button", "data-verb": verb, "data-who": one.id, "aria-label": `${label.slice(0, -1)} ${one.id}` }, label));
    const line = element("div", { class: "worker", "data-worker": one.id }, element("div", { class: "who" }, name, about), cells, element("div", { class: "speed" }, words, bar), buttons);
    return { line, name, about, cells, words, fill, bar, buttons, shown: "" };
  }

  #fill(row, one, { first, total, slowest, canAsk }) {
    const phase = one.phase === "working" || one.phase === "" ? "" : one.phase;
    row.name.textContent = one.id;
    row.about.textContent = [one.rank === null || one.id === `rank ${one.rank}` ? "" : `rank ${one.rank}`, one.host, phase].filter(Boolean).join(" · ");
    row.line.classList.toggle("is-lost", ["lost", "gone", "removed"].includes(one.phase));
    row.buttons.hidden = !canAsk;
    const shown = `${first}/${one.shards}/${total}/${one.colour}`;
    if (shown !== row.shown) {
      row.shown = shown;
      row.cells.className = `cells hue-${(one.colour ?? 7) % 8}${total > MANY ? " many" : ""}`;
      row.cells.setAttribute("role", "img");
      row.cells.setAttribute("aria-label", one.shards ? `shards ${first} to ${first + one.shards - 1}` : "no shards");
      const step = Math.max(1, Math.ceil(total / MOST_CELLS));
      const cells = [];
      for (let shard = first; shard < first + one.shards; shard += step)
        cells.push(element("i", { class: "cell", "data-shard": String(shard) }, element("span", {}, String(shard))));
      row.cells.replaceChildren(...cells);
    }
    row.words.textContent = one.shard_s === null ? "" : `${seconds(one.shard_s)} a shard`;
    row.bar.hidden = one.shard_s === null;
    row.fill.parentElement.className = `bar hue-${(one.colour ?? 7) % 8}`;
    row.fill.style.width = `${(100 * (one.shard_s ?? 0)) / slowest}%`;
  }

  #positions() {
    const found = new Map();
    for (const cell of this.#place.querySelectorAll(".cell")) found.set(cell.dataset.shard, [cell.closest(".worker").dataset.worker, cell.getBoundingClientRect()]);
    return found;
  }

  // First, last, invert, play: a cell that another worker computes now glides over to it.
  #move(before) {
    if (!before.size || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    for (const cell of this.#place.querySelectorAll(".cell")) {
      const [worker, from] = before.get(cell.dataset.shard) ?? [];
      if (!from || worker === cell.closest(".worker").dataset.worker) continue;
      const to = cell.getBoundingClientRect();
      cell.animate([{ transform: `translate(${from.left - to.left}px, ${from.top - to.top}px)` }, { transform: "none" }], { duration: 500, easing: "cubic-bezier(.2,.7,.2,1)" });
    }
  }
}
