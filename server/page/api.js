// The server: its properties, and answers as they come. Nothing here touches the page.

const KEY = "mirrorsd.key";

/** What the server refuses, with its code. */
export class Refusal extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

/** What a reader is told of an error of asking. */
export function inWords(error) {
  return error instanceof Refusal ? error.message : "The server does not answer. Is it still running?";
}

/** The key comes in the fragment, which is never sent, and leaves the address bar at once; says whether there was one. */
export function takeKeyFromAddress() {
  const key = new URLSearchParams(location.hash.slice(1).replaceAll("+", "%2B")).get("key");
  if (key === null) return false;
  setKey(key);
  history.replaceState(null, "", location.pathname);
  return true;
}

/** Signs that no key has would be refused by `fetch`, as if there were no server: the server shall refuse the key. */
export function setKey(key) {
  sessionStorage.setItem(KEY, key.trim().replace(/[^!-~]/g, "?"));
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function refuse(response) {
  let body = null;
  try {
    body = await response.json();
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
  throw new Refusal(response.status, body?.error);
}

/** `GET /props` of a model, or of the first one. Paths are relative: the page may stand behind a prefix. */
export async function properties(model) {
  const response = await fetch(model ? `props?model=${encodeURIComponent(model)}` : "props", { headers: headers() });
  return response.ok ? response.json() : refuse(response);
}

/** Chunks of an answer. Ends with the answer; throws a Refusal, also where an error comes in mid-stream. */
export async function* chunks(body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true }, mirror_tokens: true, mirror_timeline: true };
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(asked),
    signal,
  });
  if (!response.ok) await refuse(response);
  yield* framed(response);
}

/** Chunks of an answer that the server has kept, from its start; null where it has none of this id. */
export async function keptChunks(id, signal) {
  const response = await fetch(`v1/answers/${id}`, { headers: headers(), signal });
  if (response.status === 204) return null;
  return response.ok ? framed(response) : refuse(response);
}

/** End a kept answer: hanging up would leave it going on. */
export function endKept(id) {
  return fetch(`v1/answers/${id}`, { method: "DELETE", headers: headers(), keepalive: true }).catch(() => null);
}

async function* framed(response) {
  let rest = "";
  let isDone = false;
  for await (const text of texts(response.body)) {
    const frames = (rest + text).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue;
      if (frame === "data: [DONE]") {
        isDone = true;
        continue;
      }
      const chunk = JSON.parse(frame.slice(6));
      if (chunk.error) throw new Refusal(response.status, chunk.error);
      yield chunk;
    }
  }
  if (!isDone) throw new Refusal(0, { message: "The answer broke off: the server hung up.", code: "broken_off" });
}

async function* texts(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.releaseLock();
  }
}
