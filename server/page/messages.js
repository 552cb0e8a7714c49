// The conversation on the page: a box per message, its buttons, its text as markdown with colours.

import { millions } from "./answering.js";
import { button, copyButton, element } from "./elements.js";
import { Growing } from "./growing.js";
import { rendered } from "./markdown.js";
import { SOURCES, counted } from "./sources.js";
import { ThoughtBox, parts } from "./thoughts.js";
import { typeset } from "./typeset.js";

const FRAME_MS = 60;
export const WORDS = { window: "drafted", lookup: "looked up", correction: "corrected", plain: "plain" };

/** A question with its buttons. */
export function questionBox(message, { edit }) {
  const box = element("article", "message question");
  box.append(element("h2", "unseen", "You"), element("div", "said", message.content));
  const row = element("div", "buttons");
  row.append(button("Edit", () => edit(message, box), "Edit this question"));
  box.append(row);
  return box;
}

/** An answer: `update` shows what has come so far, `finish` its figures and buttons. */
export class AnswerBox {
  constructor(message, model, colours, acts) {
    this.message = message;
    this.colours = colours;
    this.acts = acts;
    this.box = element("article", "message answer");
    this.text = element("div", "text prose");
    this.stripe = element("div", "stripe");
    this.foot = element("div", "foot");
    const paint = (root, place) => colours.paint(root, message.content, message.runs, place);
    this.thought = new ThoughtBox(message.id, paint);
    this.growing = new Growing(this.text, paint);
    this.paint = paint;
    this.box.append(element("h2", "who", model), this.thought.box, this.text, this.stripe, this.foot);
    this.cost = 0;
  }

  /** Show what has come since. */
  update() {
    const started = performance.now();
    const found = parts(this.message);
    this.thought.update(found, true);
    this.growing.update(found.said, found.saidAt);
    this.cost = performance.now() - started;
  }

  /** Show the whole text at once: a word of its end may change how its beginning is read. */
  whole() {
    const found = parts(this.message);
    this.thought.update(found, false);
    this.text.replaceChildren(rendered(found.said));
    const painted = () => this.paint(this.text, found.saidAt);
    typeset(this.text, painted);
    painted();
    return found;
  }

  /** Other words about the same figures: how fast plain decoding is has been measured since. */
  say(words) {
    this.foot.querySelector(".figures").textContent = words;
  }

  /** The figures in words, or why there are none. */
  finish(words, error = "") {
    const { said } = this.whole();
    this.box.classList.remove("coming");
    for (const frame of this.text.querySelectorAll(".code-frame")) {
      const code = frame.textContent;
      frame.prepend(copyButton(code, "Copy this code"));
    }
    this.stripe.replaceChildren(...stripes(this.message.runs));
    const note = this.message.note ? [element("p", "note", this.message.note)] : [];
    const row = element("div", "buttons");
    const { retry, compare, proceed } = this.acts;
    if (!error || this.message.content) row.append(copyButton(said.trim() ? said : this.message.content, "Copy this answer"));
    if (proceed) row.append(button("Continue", () => proceed(), "Continue this answer"));
    if (retry) row.append(button("Retry", () => retry(), "Ask again"));
    if (compare) row.append(button("Compare with plain", () => compare(this)));
    const end = element("p", error ? "error" : "figures", error || words);
    if (error) end.setAttribute("role", "alert");
    this.foot.replaceChildren(...note, end, row);
  }
}

function stripes(runs) {
  const counts = counted(runs);
  return SOURCES.filter((source) => counts[source]).map((source) => {
    const part = element("span", `bar ${source}`);
    part.style.flexGrow = counts[source];
    part.title = `${counts[source]} ${WORDS[source]}`;
    return part;
  });
}

/** Draw, and stay at the end if the reader is there; or go there. */
export function atEnd(list, draw, isWanted = false) {
  const place = list.scrollTop;
  const isThere = isWanted || list.scrollHeight - place - list.clientHeight < 80;
  draw();
  if (isThere) list.scrollTop = list.scrollHeight;
  else if (list.scrollTop !== place) list.scrollTop = place; // a write would end the reader's own scrolling
}

/** Draws at most so often that drawing takes a third of the time, and stays at the end if the reader is there. */
export function paced(list, box, draw) {
  let waiting = null;
  const now = () => {
    waiting = null;
    atEnd(list, draw);
  };
  const later = () => {
    waiting ??= setTimeout(now, Math.max(FRAME_MS, 2 * (box.cost ?? 0)));
  };
  later.stop = () => clearTimeout(waiting);
  return later;
}

/** What stands where nothing was said. */
export function welcomeBox({ target, draft }) {
  const box = element("div", "welcome");
  box.append(element("h2", "", "Ask something"));
  if (target) {
    box.append(element("p", "", `A model of ${millions(target)} parameters answers. A draft of ${millions(draft)} works ahead of it, and changes no word of the answer.`));
  }
  return box;
}

/** A question's box becomes a form: it is asked `again` in other words, or left as it is. */
export function editQuestion(message, box, { again, leave }) {
  const form = element("form", "edit");
  const field = element("textarea");
  field.value = message.content;
  field.rows = Math.min(8, message.content.split("\n").length + 1);
  field.setAttribute("aria-label", "Edit this question");
  field.dir = "auto";
  const row = element("div", "buttons");
  const save = element("button", "small-button", "Ask this instead");
  save.type = "submit";
  row.append(save, button("Leave it", leave));
  form.append(field, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) again(field.value);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  box.replaceChildren(form);
  field.focus();
}
