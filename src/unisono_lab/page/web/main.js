import { ask, say, share } from "./asking.js";
import { Plots } from "./plots.js";
import { Ribbon, shape } from "./ribbon.js";
import { Run, Table, clock, element, figure, seconds, svg } from "./run.js";
import { enter, listen, post } from "./session.js";
import { hideTip } from "./tip.js";
import { Workers } from "./workers.js";

const at = (id) => document.getElementById(id);
const run = new Run(), plots = new Plots(at("plots"), refine), ribbon = new Ribbon(at("ribbon"));
const workers = new Workers(at("workers"), (verb, who) => ask(verb, who));
let away = "", due = false, heardAt = 0;

const OVER = ["done", "failed", "stopped", "over", "finished", "preempted"];

function draw() {
  due = false;
  const { head } = run;
  at("trouble").textContent = away || head?.trouble || (head?.state === "failed" ? head.why : "") || (head?.behind ? "Reading the history of the run…" : "");
  at("trouble").hidden = !at("trouble").textContent;
  at("state").textContent = away ? "not connected" : head?.state ?? "connecting";
  at("state").dataset.state = away ? "away" : head?.state ?? "";
  if (!head) return;
  document.title = `${run.name} – Unisono`;
  at("name").textContent = run.name;
  const canAsk = run.may === "act" && head.sizes !== null && !OVER.includes(head.state) && !away;
  at("may").hidden = run.may === "act";
  [at("asks").hidden, at("share").hidden] = [!canAsk, run.may !== "act"];
  tiles(head);
  workers.draw(run, canAsk);
  at("workers-note").textContent = note(head);
  events();
  const newest = Math.max(0, ...run.marks.map((mark) => mark.until), run.get("loss").at(-1)?.[1] ?? 0);
  ribbon.draw(run, OVER.includes(head.state) || !newest ? newest : Math.max(newest, Date.now() / 1000));
  plots.draw(run);
}

function note(head) {
  const hosts = head.hosts.map((one) => `${one.host}: room for ${one.workers}`).join(", ");
  const sizes = head.sizes ? `${head.sizes.wanted} wanted, ${head.sizes.smallest} to ${head.sizes.largest} allowed` : "";
  const mute = head.sizes || run.may !== "act" || OVER.includes(head.state) ? "" : "no coordinator answers (a job with a fixed number of workers has none), so there are no buttons";
  return [head.more ? `${head.more} more are not shown` : "", sizes, mute, hosts].filter(Boolean).join(" · ");
}

function tiles(head) {
  const { latest, seconds: parts } = head, training = head.workers.filter((one) => one.rank !== null).length + head.more;
  const exposed = parts.total ? `${figure((100 * (parts.exposed_communication ?? 0)) / parts.total, 2)} %` : "–";
  const last = (name) => run.get(name).at(-1)?.[4];
  const wanted = head.sizes ? ` of ${head.sizes.wanted}` : "";
  const found = [
    ["Step", figure(latest.step)], ["Epoch", figure(latest.epoch)], ["Loss", figure(latest.loss)],
    ["Samples / s", figure(latest.samples_per_s, 3)], ["Workers", `${training}`, wanted], ["Generation", figure(head.generation)],
    ["Step time", seconds(parts.total)], ["Exposed comm.", exposed], ["Batch size", figure(latest.batch_size)],
    ["Learning rate", figure(latest.learning_rate ?? latest.lr)], ["Noise scale", figure(last("noise_scale"))], ["Gradient norm", figure(last("gradient_norm"))],
  ].filter(([name, value]) => value !== "–" || ["Step", "Loss"].includes(name));
  const place = at("tiles");
  if (place.children.length !== found.length) place.replaceChildren(...found.map(() => element("div", { class: "tile" }, element("dt"), element("dd"))));
  found.forEach(([name, value, more], index) => {
    const [dt, dd] = place.children[index].children;
    dt.textContent = name;
    dd.replaceChildren(value, ...(more ? [element("small", {}, more)] : []));
  });
}

let told = null;
function events() {
  if (told === run.events) return;
  told = run.events;
  at("events").replaceChildren(...run.events.map(({ kind, time, title }) => {
    const sign = svg("svg", { viewBox: "-7 -7 14 14", class: `kind-${kind}`, "aria-hidden": "true" }, shape(kind));
    return element("li", { "data-kind": kind }, element("time", {}, clock(time)), sign, element("p", {}, title));
  }));
}

function later() {
  if (!due) requestAnimationFrame(draw);
  due = true;
}

function theme(next) {
  const order = ["", "light", "dark"], stored = localStorage.getItem("theme") ?? "";
  const chosen = next ? order[(order.indexOf(stored) + 1) % 3] : stored;
  localStorage.setItem("theme", chosen);
  const isDark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  at("theme").textContent = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" }[chosen];
  if (run.head) plots.again(run);
}

// Points that the server has thinned for the whole run are asked for again, for the range that is looked at.
let asked = null, asking = 0;
function refine(axis, range) {
  asked?.abort();
  clearTimeout(asking);
  at("whole").hidden = range === null;
  if (range !== null && run.isThinned) asking = setTimeout(finer, 150, axis, range); // a key that is held comes again and again
  else run.finer = new Table();
  later();
}

async function finer(axis, { min, max }) {
  const { signal } = (asked = new AbortController());
  const { ok, answer } = await post("/finer", { axis, low: Math.max(0, min), high: Math.max(0, max) }, signal);
  if (signal.aborted) return;
  if (ok) (run.finer = new Table()).take({ first: 0, steps: [], times: [], values: {}, ...answer.curves });
  else say(answer.error, true);
  later();
}

function axis() {
  plots.overTime = !plots.overTime;
  at("axis").setAttribute("aria-pressed", String(plots.overTime));
  if (run.head) plots.again(run);
}

at("theme").addEventListener("click", () => theme(true));
at("whole").addEventListener("click", () => { plots.zoom = null; });
at("axis").addEventListener("click", axis);
at("share").addEventListener("click", share);
at("asks").addEventListener("click", (event) => event.target.dataset.ask && ask(event.target.dataset.ask, undefined, run.head.sizes));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(false));
addEventListener("resize", later);
addEventListener("keydown", (event) => {
  if (event.target.matches("input, dialog *") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "t") axis();
  if (event.key === "d") theme(true);
  if (event.key === "Escape") hideTip();
});
theme(false);

const turned = await enter();
if (turned) away = turned;
later();
await listen((news) => { run.take(news); away = ""; heardAt = Date.now(); later(); }, (why) => { away = turned || why; later(); });
