// What is shown beside what one points at, or has come to by keyboard.

import { clock, element } from "./run.js";

const tip = document.getElementById("tip");

export function showTip(target, title, about) {
  const rows = Object.entries(about).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  tip.replaceChildren(element("strong", {}, title), element("dl", {}, ...rows));
  tip.hidden = false;
  const box = target.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2), innerWidth - own.width - 8);
  const below = box.bottom + 8 + own.height < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - own.height - 8)}px`;
}

export function hideTip() {
  tip.hidden = true;
}

export function aboutMark(mark) {
  const about = { time: clock(mark.time) };
  if (mark.many > 1) about.events = `${mark.many}, until ${clock(mark.until)}; the newest:`;
  if (mark.step !== null) about["after step"] = String(mark.step);
  for (const [name, value] of Object.entries(mark.figures)) if (name !== "step") about[name] = value;
  return about;
}
