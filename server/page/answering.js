// One answer from question to figures. Knows the server and the conversation, not the page.

import { chunks, keptChunks } from "./api.js";
import { addTokens } from "./sources.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

/** The body of a request; settings that were left empty are left out. */
export function requestBody(model, settings, messages) {
  const body = { model, messages: [...systemMessage(settings), ...messages.map(asSent)] };
  for (const name of NUMBERS) if (Number.isFinite(settings[name])) body[name] = settings[name];
  if (settings.method) body.method = settings.method;
  return body;
}

function asSent({ role, content, reasoning }) {
  return reasoning ? { role, content, reasoning_content: reasoning } : { role, content };
}

function systemMessage(settings) {
  return settings.system ? [{ role: "system", content: settings.system }] : [];
}

/** Ask; `tell` is called for every chunk. A full context leaves the oldest turns out: `answer.dropped` says how many. */
export async function ask(body, answer, signal, tell) {
  const start = answer.content;
  if (answer.pending) body.mirror_keep = answer.pending;
  for (;;) {
    try {
      for await (const chunk of chunks(body, signal)) take(answer, chunk, tell);
      return;
    } catch (error) {
      const isKept = error.code === "in_use" || (isBroken(error) && body.mirror_keep);
      if (isKept && (await reconnected(answer, signal, tell))) return;
      if (error.code !== "context_length_exceeded" || answer.content !== start) throw error;
      const shorter = withoutOldestTurn(body.messages);
      if (!shorter) throw error;
      body.messages = shorter;
      answer.dropped = (answer.dropped ?? 0) + 1;
    }
  }
}

/** Ask as the only page that does. */
export function askAlone(body, answer, signal, tell) {
  return alone(answer, {}, () => ask(body, answer, signal, tell));
}

/** Act under the lock of an answer; false where another page has it and `ifAvailable` was said. Plain HTTP has no locks. */
async function alone({ pending }, how, act) {
  if (!navigator.locks) {
    await act();
    return true;
  }
  return navigator.locks.request(pending, how, async (lock) => {
    if (lock) await act();
    return Boolean(lock);
  });
}

const UNHEARD_MS = 250;
const MOST_LOOKS = 8;

/**
 * Read an answer that goes on without this page from its start; false where the server has it no more.
 *
 * A page that was left just after its question may not have asked: another page of it still may, else this one does.
 */
export async function resumeOrAsk(answer, signal, tell, body) {
  const isNew = answer.content === (answer.before?.content ?? "");
  const resumed = () => resume(answer, signal, tell);
  for (let look = 1; ; look += 1) {
    if (await resumed()) return true;
    if (!isNew) return false;
    await new Promise((resolve) => setTimeout(resolve, UNHEARD_MS));
    if (look < MOST_LOOKS) continue;
    const act = async () => (await resumed()) || ask(body(), answer, signal, tell);
    if (await alone(answer, { ifAvailable: true }, act)) return true;
  }
}

/** What a stream ends with whose network or server went away. */
function isBroken(error) {
  return error instanceof TypeError || error.code === "broken_off";
}

/** Read an answer from its start once the server can be reached again; false where that takes long, or it has it not. */
async function reconnected(answer, signal, tell) {
  for (let look = 1; look <= MOST_LOOKS; look += 1) {
    try {
      return await resume(answer, signal, tell);
    } catch (error) {
      if (!isBroken(error)) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, look * UNHEARD_MS));
  }
  return false;
}

async function resume(answer, signal, tell) {
  const found = await keptChunks(answer.pending, signal);
  if (found === null) return false;
  const { content, runs, reasoning = "" } = answer.before ?? { content: "", runs: [] };
  Object.assign(answer, { content, runs: structuredClone(runs), reasoning });
  for await (const chunk of found) take(answer, chunk, tell);
  return true;
}

/** What is kept of an answer that has ended: where nothing came of it, the one that it was asked instead of. */
export function settled({ instead, ...message }) {
  if (!instead?.content || message.content || message.reasoning) return message;
  return { ...instead, note: `Asked again in vain: ${message.error || message.note || "the answer has no words."}` };
}

/** The same request, to go on with the answer that it ends with. */
export function continued(body) {
  return { ...body, continue_final_message: true };
}

/** Whether an answer ends where its model would have gone on. */
export function isCut(answer) {
  return Boolean(answer.content) && (!answer.figures || answer.figures.stop_reason === "length");
}

function take(answer, chunk, tell) {
  const { content, reasoning_content: thought } = chunk.choices[0]?.delta ?? {};
  answer.content += content ?? "";
  if (thought) answer.reasoning = (answer.reasoning ?? "") + thought;
  addTokens(answer.runs, chunk.mirror_tokens ?? []);
  answer.fingerprint = chunk.system_fingerprint ?? answer.fingerprint;
  if (chunk.mirror) answer.figures = { ...chunk.mirror, ...chunk.timings };
  tell(chunk);
}

function withoutOldestTurn(messages) {
  const start = messages[0].role === "system" ? 1 : 0;
  const second = messages.findIndex((message, place) => place > start && message.role === "user");
  return second < 0 ? null : [...messages.slice(0, start), ...messages.slice(second)];
}

/** The same request once more, decoded plainly with the seed that the answer had. */
export function plainBody(body, figures) {
  const again = { ...body, method: "plain" };
  delete again.mirror_keep;
  if (figures.seed !== null) again.seed = figures.seed;
  return again;
}

/** What a finished answer says about itself, in one line. */
export function figuresInWords(figures, plainSpeed) {
  const words = [`${figures.predicted_n} tokens`, `${speedOf(figures).toFixed(speedOf(figures) < 100 ? 1 : 0)} tokens/s`];
  if (plainSpeed && figures.draft_n) words.push(`${(speedOf(figures) / plainSpeed).toFixed(2)}× plain`);
  if (figures.draft_n) words.push(`draft right ${percent(figures.draft_n_accepted / figures.draft_n)}`);
  words.push(figures.seed === null ? "greedy" : `seed ${figures.seed}`);
  if (figures.stop_reason === "length") words.push("cut at the most tokens");
  if (figures.stop_reason === "context") words.push("the context is full");
  return words.join(" · ");
}

export function speedOf(figures) {
  return figures.tokens_per_second ?? figures.predicted_per_second;
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

/** 134,500,000 parameters as "135 million". */
export function millions({ parameters }) {
  const count = parameters / 1e6;
  return count >= 1000 ? `${(count / 1000).toFixed(1)} billion` : `${count < 10 ? count.toFixed(1) : Math.round(count)} million`;
}
