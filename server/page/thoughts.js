// Reasoning that comes before an answer: told apart from it, and folded.

import { element } from "./elements.js";
import { Growing } from "./growing.js";

const OPENED = /^\s*(?:<(?:think|thinking|thought)>|\[THINK\])/i;
const CLOSED = /(?:<\/(?:think|thinking|thought)>|\[\/THINK\])\s*/i;
const CLOSED_ALONE = /(?<=^|\n)[ \t]*(?:<\/(?:think|thinking|thought)>|\[\/THINK\])[ \t]*(?:\n\s*|$)/gi;
const FENCE = /^[ \t]*(?:```|~~~)/gm;
const opened = new Set(); // ids of answers whose reasoning is read

/**
 * What of an answer is reasoning: {thought, thoughtAt, said, saidAt, isThinking}, the places being those in its content.
 *
 * A server may send it apart (`reasoning`). In the content it stands between tags. The first one may be missing, where
 * the model's template has written it into the prompt; the second one stands on a line of its own then, and in no code.
 */
export function parts({ content, reasoning = "" }) {
  const start = OPENED.exec(content)?.[0].length ?? 0;
  const end = start ? CLOSED.exec(content) : closedAlone(content);
  if (!start && !end) return { thought: reasoning, thoughtAt: null, said: content, saidAt: 0, isThinking: Boolean(reasoning) && !content };
  const saidAt = end ? end.index + end[0].length : content.length;
  const inside = content.slice(start, end?.index);
  return { thought: reasoning + inside, thoughtAt: reasoning ? null : start, said: content.slice(saidAt), saidAt, isThinking: !end };
}

function closedAlone(content) {
  const isOdd = (text) => (text.match(FENCE)?.length ?? 0) % 2 === 1;
  const isInCode = (place) => isOdd(content.slice(0, place)) && isOdd(content.slice(place)); // reasoning may leave code open
  return [...content.matchAll(CLOSED_ALONE)].find(({ index }) => !isInCode(index)) ?? null;
}

/** The folded box. What is in it is drawn only while it is open. */
export class ThoughtBox {
  constructor(id, paint) {
    this.box = element("details", "thought");
    this.summary = element("summary");
    this.text = element("div", "prose");
    this.growing = new Growing(this.text, paint);
    this.box.append(this.summary, this.text);
    this.box.hidden = true;
    this.box.open = opened.has(id);
    this.box.addEventListener("toggle", () => {
      if (this.box.open) opened.add(id);
      else opened.delete(id);
      this.draw();
    });
  }

  /** Show what `parts` has found; `isComing` says that more may come. */
  update({ thought, thoughtAt, isThinking }, isComing) {
    this.thought = thought;
    this.at = thoughtAt;
    this.box.hidden = !thought.trim();
    this.box.classList.toggle("coming", isComing && isThinking);
    this.summary.textContent = isComing && isThinking ? "Thinking …" : `Thoughts, ${counted(thought)}`;
    this.draw();
  }

  draw() {
    if (this.box.open && this.thought) this.growing.update(this.thought, this.at);
  }
}

function counted(text) {
  const count = text.trim().split(/\s+/).length;
  return count === 1 ? "1 word" : `${count} words`;
}
