// The buttons: what the command line can do, asked for once more before it is done.

import { post } from "./session.js";

const dialog = document.getElementById("dialog"), yes = document.getElementById("dialog-yes");
const number = document.getElementById("dialog-number"), input = number.querySelector("input");
const link = document.getElementById("dialog-link"), toast = document.getElementById("toast");

document.getElementById("dialog-no").addEventListener("click", () => dialog.close());
yes.addEventListener("click", () => dialog.close("yes"));
input.addEventListener("keydown", (event) => event.key === "Enter" && yes.click());

const WORDS = {
  resize: () => ["Resize the job", "It goes on with another number of workers, from the next step on that it can. The weights stay the same, bit for bit.", "Resize"],
  leave: (who) => [`Have ${who} leave`, "It leaves after the step that is under way. Its place stays empty; where the hosts have other places free, a new worker starts. To have fewer workers, resize the job.", "Have it leave"],
  replace: (who) => [`Replace ${who}`, "It leaves after the step that is under way, and another worker is started in its place.", "Replace it"],
  checkpoint: () => ["Write a checkpoint", "All workers write one at the end of the step that is under way.", "Write it"],
  stop: () => ["Stop the job", "All workers leave with a checkpoint, and the job ends. Start it again to go on.", "Stop the job"],
};

export async function ask(verb, who, sizes) {
  const [title, words, doIt] = WORDS[verb](who);
  number.hidden = verb !== "resize";
  if (sizes) [input.min, input.max, input.value] = [sizes.smallest, sizes.largest, sizes.wanted];
  if (!(await confirmed(title, words, doIt, verb === "stop"))) return;
  const body = verb === "resize" ? { workers: Number(input.value) } : who ? { who } : {};
  const { ok, answer } = await post(`/ask/${verb}`, body);
  say(ok ? `${title}: asked for` : answer.error, !ok);
}

export async function share() {
  const { ok, answer } = await post("/share", null);
  if (!ok) return say(answer.error, true);
  number.hidden = true;
  link.hidden = false;
  link.value = `${location.origin}/#${answer.key}`;
  const shown = confirmed("Share this page", "Who has this link may look, as often as they like, and press nothing. It is good as long as this page is served.", "Copy", false);
  link.select();
  if ((await shown) && navigator.clipboard) await navigator.clipboard.writeText(link.value).then(() => say("Copied"), () => say("Copy it by hand", true));
  [link.hidden, link.value] = [true, ""];
}

function confirmed(title, words, doIt, isGrave) {
  document.getElementById("dialog-title").textContent = title;
  document.getElementById("dialog-words").textContent = words;
  yes.textContent = doIt;
  yes.classList.toggle("grave", isGrave);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

let hiding = 0;
export function say(words, isBad = false) {
  toast.textContent = words;
  toast.classList.toggle("bad", isBad);
  toast.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { toast.hidden = true; }, isBad ? 8000 : 4000);
}
