// The page: wires the server, the conversations and what is shown together.

import { Refusal, properties, setKey, takeKeyFromAddress } from "./api.js";
import { ask, figuresInWords, millions, plainBody, requestBody, speedOf } from "./answering.js";
import { AnswerBox, Comparison, button, element, questionBox } from "./messages.js";
import { Panel } from "./panel.js";
import { fillSettings, readSettings, setUpDrawers, setUpTheme } from "./controls.js";
import { Colours } from "./sources.js";
import { Store } from "./store.js";

const byId = (id) => document.getElementById(id);
const FRAME_MS = 60;
const LEAST_MEASURED = 24;

takeKeyFromAddress();
const store = new Store();
const colours = new Colours();
const panel = new Panel(byId);
const page = { props: null, running: null };

const messages = byId("messages");
const question = byId("question");

function announce(words) {
  byId("announcer").textContent = words;
}

function setRunning(controller) {
  page.running = controller;
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
  document.body.classList.toggle("is-answering", controller !== null);
}

async function connect(model) {
  try {
    page.props = await properties(model);
  } catch (error) {
    byId("state").textContent = error instanceof Refusal ? error.message : "The server does not answer.";
    if (error.status === 401) byId("key-dialog").showModal();
    else if (!(error instanceof Refusal) || error.status === 503) setTimeout(() => connect(model), 1500);
    return;
  }
  byId("state").textContent = "";
  const { models, methods, sources, plain_tokens_per_second: plain } = page.props;
  const shown = models.map((name) => new Option(name, name, false, name === page.props.model));
  byId("model").replaceChildren(...shown);
  byId("settings-form").elements.method.replaceChildren(...methods.map((name) => new Option(name, name)));
  panel.explain(sources);
  panel.plainSpeed ??= plain;
  panel.showPlain();
  show();
}

// Conversations

function showList() {
  const items = store.conversations.map((one) => {
    const item = element("li", one.id === store.currentId ? "is-current" : "");
    const open = button(store.title(one), () => openConversation(one.id));
    if (one.id === store.currentId) open.setAttribute("aria-current", "true");
    item.append(open, button("×", () => removeConversation(one), `Delete ${store.title(one)}`));
    return item;
  });
  byId("conversations").replaceChildren(...items);
}

function openConversation(id) {
  page.running?.abort();
  store.open(id);
  show();
  closeDrawers();
  question.focus();
}

function removeConversation(one) {
  if (one.messages.length && !confirm(`Delete "${store.title(one)}"?`)) return;
  page.running?.abort();
  store.remove(one.id);
  show();
}

function keep() {
  if (!store.save()) byId("state").textContent = "This browser has no room left: delete a conversation.";
}

function show() {
  colours.clear();
  messages.replaceChildren();
  const { messages: said } = store.current;
  said.forEach((message, place) => {
    if (message.role === "user") messages.append(questionBox(message, { edit }));
    else messages.append(finished(message, place === said.length - 1).box);
  });
  if (!said.length) messages.append(welcome());
  showList();
  messages.scrollTop = messages.scrollHeight;
}

function welcome() {
  const box = element("div", "welcome");
  const { target, draft } = page.props ?? {};
  box.append(element("h2", "", "Ask something"));
  if (target) {
    box.append(element("p", "", `A model of ${millions(target)} parameters answers. A draft of ${millions(draft)} works ahead of it, and changes no word of the answer.`));
  }
  return box;
}

function actsFor(isLast) {
  const copy = (message) => navigator.clipboard.writeText(message.content).then(() => announce("Copied."));
  return { copy, retry: isLast ? retry : null, compare: isLast ? compare : null };
}

function finished(message, isLast) {
  const acts = actsFor(isLast);
  if (!message.figures) acts.compare = null;
  const box = new AnswerBox(message, message.model ?? "", colours, acts);
  if (message.error) {
    box.update();
    box.fail(message.error);
  } else {
    box.finish(message.figures ? figuresInWords(message.figures, panel.plainSpeed) : "stopped");
  }
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

async function send(text) {
  store.current.messages.push({ role: "user", content: text });
  await answerLast();
}

async function answerLast() {
  const conversation = store.current;
  const body = requestBody(page.props?.model, withRoom(conversation.settings), conversation.messages);
  const message = { role: "assistant", content: "", runs: [], figures: null, model: page.props?.model ?? "" };
  conversation.messages.push(message);
  show();
  messages.lastElementChild.remove();
  const box = new AnswerBox(message, message.model, colours, actsFor(true));
  box.box.classList.add("coming");
  messages.append(box.box);
  messages.scrollTop = messages.scrollHeight;
  panel.begin();
  const controller = new AbortController();
  setRunning(controller);
  announce("Answering.");
  const draw = paced(box, () => box.update());
  try {
    await ask(body, message, controller.signal, (chunk) => {
      panel.take(chunk);
      if (chunk.choices[0]?.delta?.content) draw();
    });
    panel.finish(message.figures);
    announce(`Answer: ${message.content}`);
  } catch (error) {
    explain(error, message);
    panel.finish(null);
  }
  draw.stop();
  if (message.dropped) message.note = `The oldest ${message.dropped === 1 ? "turn was" : `${message.dropped} turns were`} left out: the context holds ${page.props.context} tokens.`;
  if (page.running === controller) setRunning(null);
  keep();
  if (store.current === conversation) show();
}

function explain(error, message) {
  if (error.name === "AbortError") {
    message.note = "Stopped.";
    announce("Stopped.");
    return;
  }
  if (!(error instanceof Refusal) && !(error instanceof TypeError)) throw error;
  message.error = error instanceof Refusal ? error.message : "The server does not answer. Is it still running?";
  if (error.status === 401) byId("key-dialog").showModal();
}

/** Draws at most so often that drawing takes a third of the time, and stays at the end if the reader is there. */
function paced(box, draw) {
  let waiting = null;
  const now = () => {
    waiting = null;
    const isAtEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 80;
    draw();
    if (isAtEnd) messages.scrollTop = messages.scrollHeight;
  };
  const later = () => {
    waiting ??= setTimeout(now, Math.max(FRAME_MS, 2 * (box.cost ?? 0)));
  };
  later.stop = () => clearTimeout(waiting);
  return later;
}

async function retry() {
  if (page.running) return;
  store.current.messages.pop();
  await answerLast();
}

function edit(message, box) {
  if (page.running) return;
  const form = element("form", "edit");
  const field = element("textarea");
  field.value = message.content;
  field.rows = Math.min(8, message.content.split("\n").length + 1);
  field.setAttribute("aria-label", "Edit this question");
  const row = element("div", "buttons");
  const save = element("button", "small-button", "Ask this instead");
  save.type = "submit";
  row.append(save, button("Leave it", show));
  form.append(field, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!field.value.trim()) return;
    const conversation = store.current;
    conversation.messages = conversation.messages.slice(0, conversation.messages.indexOf(message));
    send(field.value);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  box.replaceChildren(form);
  field.focus();
}

async function compare(answerBox) {
  if (page.running) return;
  const conversation = store.current;
  const { message } = answerBox;
  const before = conversation.messages.slice(0, conversation.messages.indexOf(message));
  const body = requestBody(message.model, withRoom(conversation.settings), before);
  const comparison = new Comparison(answerBox, message.figures.seed);
  const plain = { content: "", runs: [], figures: null };
  const controller = new AbortController();
  setRunning(controller);
  const draw = paced({}, () => comparison.update(plain.content));
  try {
    await ask(plainBody(body, message.figures), plain, controller.signal, draw);
    draw.stop();
    comparison.update(plain.content);
    comparison.judge(message, plain, comparedSpeeds(message.figures, plain.figures));
    answerBox.say(figuresInWords(message.figures, panel.plainSpeed));
    panel.show(message.figures);
  } catch (error) {
    draw.stop();
    if (error.name !== "AbortError" && !(error instanceof Refusal) && !(error instanceof TypeError)) throw error;
    comparison.fail(error.name === "AbortError" ? "The comparison was stopped." : error.message);
  }
  if (page.running === controller) setRunning(null);
  messages.scrollTop = messages.scrollHeight;
}

/** Speeds of both, unless the text is too short to measure, or the answer was plain itself. */
function comparedSpeeds(figures, plain) {
  if (plain.predicted_n < LEAST_MEASURED) return null;
  panel.plainSpeed = speedOf(plain);
  panel.showPlain();
  return figures.draft_n ? { answer: speedOf(figures), plain: panel.plainSpeed } : null;
}

// Controls

const closeDrawers = setUpDrawers(byId);
setUpTheme(byId("theme"), () => panel.draw());

function grow() {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight, 200)}px`;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value;
  if (!text.trim() || page.running) return;
  question.value = "";
  grow();
  send(text);
});
question.addEventListener("input", grow);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && page.running && !document.querySelector("dialog[open]")) page.running.abort();
  if (event.altKey && event.key === "n") byId("new").click();
});
byId("stop").addEventListener("click", () => page.running?.abort());
byId("new").addEventListener("click", () => openConversation(store.add().id));
byId("model").addEventListener("change", (event) => connect(event.target.value));
byId("colours").addEventListener("change", (event) => {
  colours.isOn = event.target.checked;
  show();
});
byId("open-settings").addEventListener("click", () => {
  fillSettings(byId("settings-form"), store.current.settings, hints());
  byId("settings").showModal();
});
byId("clear-settings").addEventListener("click", () => fillSettings(byId("settings-form"), {}, hints()));
byId("settings").addEventListener("close", () => {
  if (byId("settings").returnValue !== "ok") return;
  store.current.settings = readSettings(byId("settings-form"));
  keep();
});
byId("key-form").addEventListener("submit", (event) => {
  setKey(event.target.elements.key.value);
  connect();
});

show();
connect();
