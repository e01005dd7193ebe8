// Gets in with the key behind the # of the link, which no server and no log ever sees, and listens.

const WORD = "unisono-page"; // this origin's alone: another port of the host does not see it, as it would see a cookie

export async function enter() {
  const key = location.hash.slice(1);
  history.replaceState(null, "", location.pathname);
  if (!key) return "";
  const answer = await fetch("/enter", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ key }) });
  const found = await answer.json();
  if (!answer.ok) return found.error;
  localStorage.setItem(WORD, found.page);
  return "";
}

function headers() {
  return { "x-unisono-page": localStorage.getItem(WORD) ?? "" };
}

export async function post(path, body, signal) {
  try {
    const about = body === null ? { headers: headers() } : { method: "POST", headers: { ...headers(), "content-type": "application/json" }, body: JSON.stringify(body) };
    const answer = await fetch(path, { ...about, signal });
    return { ok: answer.ok, answer: await answer.json() };
  } catch {
    return { ok: false, answer: { error: "The page's server does not answer." } };
  }
}

// Calls back with each message, and with why there are none; comes back by itself until it is turned away.
export async function listen(heard, away) {
  for (let wait = 500; ; wait = Math.min(5000, 2 * wait)) {
    try {
      const answer = await fetch("/stream", { headers: headers() });
      if (!answer.ok) {
        away((await answer.json()).error);
        if (answer.status === 401) return;
      } else {
        wait = 500;
        await read(answer.body, heard);
      }
    } catch (error) {
      if (!(error instanceof TypeError) && error.name !== "AbortError") throw error;
    }
    away("The page's server does not answer. When it has ended, ‘unisono page’ with the run folder shows the run again.");
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

async function read(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const messages = text.split("\n\n");
    text = messages.pop();
    for (const message of messages) heard(JSON.parse(message.slice(6)));
  }
}
