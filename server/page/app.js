// The page: wires the server, the conversations and what is shown together.

import { Refusal, endKept, inWords, properties, setKey, takeKeyFromAddress } from "./api.js";
import { askAlone, continued, figuresInWords, isCut, requestBody, resumeOrAsk, settled } from "./answering.js";
import { Boxes } from "./boxes.js";
import { button, element } from "./elements.js";
import { AnswerBox, atEnd, editQuestion, paced, questionBox, welcomeBox } from "./messages.js";
import { comparePlainly } from "./comparing.js";
import { Panel } from "./panel.js";
import { fillSettings, readSettings, setUpDrawers, setUpQuestion, setUpSliders, setUpTheme } from "./controls.js";
import { Colours } from "./sources.js";
import { Store, newId } from "./store.js";
import { parts } from "./thoughts.js";
import { setUpTransfer } from "./transfer.js";

const byId = (id) => document.getElementById(id);
const SAVED_MS = 2000;

const begin = async () => [takeKeyFromAddress(), await Store.open(changedElsewhere)];
const [, store] = await begin().catch((error) => {
  byId("state").textContent = `This browser lets the page keep nothing (${error.message}): allow it to, and load the page again.`;
  throw error;
});
const panel = new Panel(byId);
const page = { props: null, comparing: null, shown: null, model: undefined };
const runs = new Map(); // by the answer's id: answers that come, in whichever conversation
const messages = byId("messages");
const colours = new Colours(messages);
const boxes = new Boxes(messages, colours);
const question = byId("question");

const announce = (words) => (byId("announcer").textContent = words);

/** The answer that comes in the conversation that is shown. */
const runHere = () => [...runs.values()].find((run) => run.conversationId === store.currentId);

function isBusy() {
  return Boolean(page.comparing || runHere());
}

function showBusy() {
  byId("send").hidden = isBusy();
  byId("stop").hidden = !isBusy();
  document.body.classList.toggle("is-answering", isBusy());
}

function stop() {
  page.comparing?.abort();
  const run = runHere();
  if (run) end(run);
}

function end(run) {
  run.isStopped = true;
  endKept(run.message.pending);
  run.controller.abort();
}

/** Ask for the model that was chosen last. */
async function connect(model = page.model) {
  page.model = model;
  const isStale = () => page.model !== model;
  try {
    const props = await properties(model);
    if (isStale()) return;
    page.props = props;
  } catch (error) {
    if (isStale()) return;
    byId("state").textContent = error instanceof Refusal ? error.message : "The server does not answer.";
    if (error.status === 401) byId("key-dialog").showModal();
    else if (!(error instanceof Refusal) || error.status === 503) setTimeout(() => isStale() || connect(), 1500);
    return;
  }
  byId("state").textContent = "";
  const { models, methods, sources, plain_tokens_per_second: plain } = page.props;
  const shown = models.map((name) => new Option(name, name, false, name === page.props.model));
  byId("model").replaceChildren(...shown);
  byId("settings-form").elements.method.replaceChildren(...methods.map((name) => new Option(name, name)));
  panel.explain(sources);
  panel.plainSpeed ??= plain;
  panel.advice = page.props.advice;
  panel.showPlain();
  for (const one of store.conversations) for (const message of one.messages) resumeOne(one.id, message);
  show();
}

// Conversations

function showList() {
  const items = store.found(byId("search").value).map((one) => {
    const item = element("li", one.id === store.currentId ? "is-current" : "");
    item.dataset.id = one.id;
    const open = button(store.title(one), () => openConversation(one.id));
    if (one.id === store.currentId) open.setAttribute("aria-current", "true");
    const rename = button("✎", () => renameConversation(one), `Rename ${store.title(one)}`);
    item.append(open, rename, button("×", () => removeConversation(one), `Delete ${store.title(one)}`));
    return item;
  });
  const focused = document.activeElement?.closest("#conversations li");
  const place = focused ? [...focused.children].indexOf(document.activeElement) : -1;
  byId("conversations").replaceChildren(...items);
  items.find((item) => item.dataset.id === focused?.dataset.id)?.children[place].focus();
}

/** Whatever answers elsewhere goes on. */
function openConversation(id) {
  page.comparing?.abort();
  store.select(id);
  panel.begin();
  show();
  closeDrawers();
  question.focus();
}

async function renameConversation(one) {
  const title = prompt("A name for this conversation:", store.title(one));
  if (title === null) return;
  await keep(one.id, (conversation) => (conversation.title = title.trim()));
  showList();
}

async function removeConversation(one) {
  if (one.messages.length && !confirm(`Delete "${store.title(one)}"?`)) return;
  for (const run of runs.values()) if (run.conversationId === one.id) end(run);
  await kept(() => store.remove(one.id));
  show();
}

/** Act on what is kept; says where the browser has no room, or does not keep it. */
async function kept(act) {
  try {
    return await act();
  } catch (error) {
    if (error && !(error instanceof DOMException)) throw error;
    const isFull = error?.name === "QuotaExceededError";
    byId("state").textContent = isFull ? "This browser has no room left: delete a conversation." : `This browser keeps nothing: ${error?.message ?? "it was stopped"}`;
    return null;
  }
}

const keep = (id, act, isQuiet = false) => kept(() => store.change(id, act, isQuiet));

function changedElsewhere(id) {
  if (page.props) for (const message of store.of(id)?.messages ?? []) resumeOne(id, message);
  const isHere = id === store.currentId && !document.querySelector(".edit") && !runHere();
  if (isHere || page.shown?.id !== store.currentId) show();
  else showList();
}

/** Show the current conversation; another one, and what was asked, from its end. */
function show(isFromEnd = page.shown?.id !== store.currentId) {
  atEnd(messages, () => held(drawCurrent), isFromEnd);
}

/** Act; where that takes away what has the focus, the conversation has it: the next key must not begin at the top. */
function held(act) {
  const before = document.activeElement;
  act();
  const now = document.activeElement;
  if (now.hidden || (now === document.body && now !== before)) messages.focus({ preventScroll: true });
}

function drawCurrent() {
  const said = (page.shown = store.current).messages;
  messages.querySelector(".welcome")?.remove();
  boxes.show(said.map((message, place) => {
    const isLast = place === said.length - 1;
    return { key: keyOf(message, isLast), make: () => boxOf(message, isLast) };
  }));
  if (!said.length) messages.append(welcomeBox(page.props ?? {}));
  showList();
  showBusy();
}

/** What a message's box depends on; of an answer that comes, its run. */
function keyOf(message, isLast) {
  if (message.role === "user") return JSON.stringify([message.id, message.content]);
  if (runs.has(message.id)) return runs.get(message.id);
  const { id, content, reasoning, model, note, error, before } = message;
  return JSON.stringify([id, content, reasoning, model, note, error, !before, isLast, wordsOf(message), colours.isOn]);
}

function boxOf(message, isLast) {
  if (message.role === "user") return questionBox(message, { edit });
  return runs.has(message.id) ? coming(runs.get(message.id)) : finished(message, isLast).box;
}

function wordsOf({ figures }) {
  return figures ? figuresInWords(figures, panel.plainSpeed) : "stopped";
}

function actsFor(isLast) {
  return { retry: isLast ? retry : null, compare: isLast ? compare : null, proceed: null };
}

/** The box of an answer that comes. */
function coming(run) {
  run.draw?.stop();
  const box = new AnswerBox(run.message, run.message.model ?? "", colours, actsFor(true));
  box.box.classList.add("coming");
  box.update();
  run.draw = paced(messages, box, () => box.update());
  return box.box;
}

function finished(message, isLast) {
  const acts = actsFor(isLast);
  if (!message.figures || message.before) acts.compare = null;
  if (isLast && isCut(message)) acts.proceed = proceed;
  const box = new AnswerBox(message, message.model ?? "", colours, acts);
  box.finish(wordsOf(message), message.error);
  return box;
}

// Asking

/** Without a choice of the reader's, an answer may take half of the context: the rest is for what is said next. */
function withRoom(settings) {
  return page.props ? { max_tokens: Math.ceil(page.props.context / 2), ...settings } : settings;
}

function hints() {
  return { ...page.props?.defaults, max_tokens: withRoom({}).max_tokens };
}

function newAnswer() {
  return { id: newId(), role: "assistant", content: "", runs: [], figures: null, model: byId("model").value, pending: newId() };
}

async function send(text, before = (conversation) => conversation.messages) {
  return answer((conversation, message) => {
    conversation.messages = [...before(conversation), { id: newId(), role: "user", content: text }, message];
  });
}

/** What is asked for an answer: all that was said before it; one that goes on is asked to go on. */
function bodyFor({ messages: said, settings: now }, { id, before, model, settings = withRoom(now) }) {
  const place = said.findIndex((one) => one.id === id);
  const body = requestBody(model || undefined, settings, said.slice(0, place + (before ? 1 : 0)));
  return before ? continued(body) : body;
}

/** Keep the question before anything is asked, and the answer's place with it; then answer. False where nothing is kept. */
async function answer(place, message = newAnswer()) {
  const id = store.currentId;
  const run = { conversationId: id, message: structuredClone(message), controller: new AbortController(), savedAt: 0 };
  runs.set(message.id, run);
  held(showBusy);
  const conversation = await keep(id, (kept) => {
    place(kept, Object.assign(message, { settings: withRoom(kept.settings) }));
    Object.assign(run.message, structuredClone(message));
  });
  if (!conversation) {
    runs.delete(message.id);
    show();
    return false;
  }
  const body = bodyFor(conversation, message);
  panel.begin();
  announce("Answering.");
  show(true);
  return follow(run, (tell) => askAlone(body, run.message, run.controller.signal, tell));
}

/** Go on with an answer that another page, or this one before, has begun. */
async function resumeOne(conversationId, message) {
  if (!message.pending || runs.has(message.id)) return;
  const run = { conversationId, message: structuredClone(message), controller: new AbortController(), savedAt: 0, isResumed: true };
  runs.set(message.id, run);
  if (conversationId === store.currentId) show();
  await follow(run, (tell) => resumeOrAsk(run.message, run.controller.signal, tell, () => bodyFor(store.of(conversationId), message)));
}

async function follow(run, work) {
  const { message, conversationId } = run;
  const isShown = () => store.currentId === conversationId;
  const tell = (chunk) => {
    if (isShown()) {
      panel.take(chunk);
      if (chunk.choices[0]?.delta) run.draw?.();
    }
    if (performance.now() - run.savedAt < SAVED_MS) return;
    run.savedAt = performance.now();
    keep(conversationId, (kept) => put(kept, structuredClone(message)), true);
  };
  try {
    const isThere = await work(tell);
    if (isThere === false) message.note = "The rest of this answer is lost: nobody read it for a minute.";
    if (isShown()) panel.finish(message.figures);
    announce(`Answer: ${parts(message).said}`);
  } catch (error) {
    explain(error, run);
    if (isShown()) panel.finish(null);
  }
  run.draw?.stop();
  if (message.dropped) message.note = `The oldest ${message.dropped === 1 ? "turn was" : `${message.dropped} turns were`} left out: the context holds ${page.props.context} tokens.`;
  message.pending = null;
  await keep(conversationId, (kept) => {
    const other = kept.messages.find((one) => one.id === message.id);
    const isDoneElsewhere = run.isResumed && !run.isStopped && other && !other.pending;
    if (!isDoneElsewhere) put(kept, settled(message), message.id);
  });
  runs.delete(message.id);
  if (isShown()) show();
  else showList();
}

function put(conversation, message, id = message.id) {
  conversation.messages = conversation.messages.map((one) => (one.id === id ? message : one));
}

function explain(error, { message, isStopped }) {
  if (isStopped || error.name === "AbortError" || error.code === "cancelled") {
    message.note = "Stopped.";
    announce("Stopped.");
    return;
  }
  if (!(error instanceof Refusal) && !(error instanceof TypeError)) throw error;
  message.error = inWords(error);
  if (error.status === 401) byId("key-dialog").showModal();
}

async function retry() {
  if (isBusy()) return;
  await answer(({ messages: said }, message) => {
    const instead = said.at(-1)?.role === "assistant" ? said.pop() : null;
    said.push(Object.assign(message, { instead }));
  });
}

/** Go on with the last answer where it was cut. */
async function proceed() {
  if (isBusy()) return;
  const last = structuredClone(store.current.messages.at(-1));
  const before = structuredClone({ content: last.content, runs: last.runs, reasoning: last.reasoning });
  const { model, pending } = newAnswer();
  const message = { ...last, before, model, pending, figures: null, note: "", error: "", dropped: 0 };
  await answer(put, message);
}

function edit(message, box) {
  if (isBusy()) return;
  const isOf = (one) => one.id === message.id;
  const again = (text) => send(text, ({ messages: said }) => said.slice(0, said.findIndex(isOf)));
  boxes.forget(box);
  editQuestion(message, box, { again, leave: () => show() });
}

async function compare(answerBox) {
  if (isBusy()) return;
  const { messages: said, settings } = store.current;
  const { message } = answerBox;
  const before = said.slice(0, said.findIndex((one) => one.id === message.id));
  const body = requestBody(message.model, message.settings ?? withRoom(settings), before);
  page.comparing = new AbortController();
  showBusy();
  await comparePlainly(answerBox, body, { panel, messages, signal: page.comparing.signal });
  page.comparing = null;
  held(showBusy);
}

// Controls

const closeDrawers = setUpDrawers(byId);
setUpTheme(byId("theme"), () => panel.draw());

setUpQuestion(byId("ask"), question, (text) => !isBusy() && send(text));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && isBusy() && !document.querySelector("dialog[open]")) stop();
  if (event.altKey && event.key === "n") byId("new").click();
});
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", () => openConversation(store.add([...runs.values()].map((run) => run.conversationId)).id));
byId("model").addEventListener("change", (event) => connect(event.target.value));
byId("colours").addEventListener("change", (event) => {
  colours.isOn = event.target.checked;
  show();
});
byId("open-settings").addEventListener("click", () => {
  fillSettings(byId("settings-form"), store.current.settings, hints());
  byId("settings").dataset.of = store.currentId; // another tab may delete it meanwhile
  Object.assign(byId("settings"), { returnValue: "" }).showModal(); // Esc says nothing of its own
});
byId("clear-settings").addEventListener("click", () => fillSettings(byId("settings-form"), {}, hints()));
byId("settings").addEventListener("close", () => {
  if (byId("settings").returnValue !== "ok") return;
  const settings = readSettings(byId("settings-form"));
  keep(byId("settings").dataset.of, (conversation) => (conversation.settings = settings));
});
byId("key-form").addEventListener("submit", (event) => {
  setKey(event.target.elements.key.value);
  connect();
});

byId("search").addEventListener("input", showList);
setUpTransfer(byId, store, kept, showList);
setUpSliders(byId("settings-form"));
addEventListener("hashchange", () => takeKeyFromAddress() && connect());
show();
connect();
