// An answer once more, decoded plainly, and whether both are the same.

import { Refusal, inWords } from "./api.js";
import { ask, figuresInWords, plainBody, speedOf } from "./answering.js";
import { element } from "./elements.js";
import { Growing } from "./growing.js";
import { rendered } from "./markdown.js";
import { atEnd, paced } from "./messages.js";
import { parts } from "./thoughts.js";
import { typeset } from "./typeset.js";

const LEAST_MEASURED = 24;

/** Ask for an answer plainly, under it in the list `messages`; `body` is what it was asked with. */
export async function comparePlainly(answerBox, body, { panel, messages, signal }) {
  const { message } = answerBox;
  const comparison = new Comparison(answerBox, message.figures.seed);
  const plain = { content: "", runs: [], figures: null };
  const draw = paced(messages, {}, () => comparison.update(plain.content));
  try {
    await ask(plainBody(body, message.figures), plain, signal, draw);
    draw.stop();
    atEnd(messages, () => comparison.judge(message, plain, comparedSpeeds(message.figures, plain.figures, panel)));
    answerBox.say(figuresInWords(message.figures, panel.plainSpeed));
    panel.show(message.figures);
  } catch (error) {
    draw.stop();
    if (error.name !== "AbortError" && !(error instanceof Refusal) && !(error instanceof TypeError)) throw error;
    comparison.fail(error.name === "AbortError" ? "The comparison was stopped." : inWords(error));
  }
}

/** Speeds of both, unless the text is too short to measure, or the answer was plain itself. */
function comparedSpeeds(figures, plain, panel) {
  if (plain.predicted_n < LEAST_MEASURED) return null;
  panel.plainSpeed = speedOf(plain);
  panel.showPlain();
  return figures.draft_n ? { answer: speedOf(figures), plain: panel.plainSpeed } : null;
}

/** Side by side under an answer: the same seed, decoded plainly. */
class Comparison {
  constructor(answerBox, seed) {
    this.box = element("section", "comparison");
    this.box.setAttribute("aria-label", "The same, decoded plainly");
    this.head = element("p", "verdict", seed === null ? "Decoding the same plainly …" : `Decoding the same plainly, seed ${seed} …`);
    this.head.setAttribute("role", "status");
    this.text = element("div", "text prose plain-text");
    this.growing = new Growing(this.text);
    this.box.append(this.head, this.text);
    answerBox.box.querySelector(".comparison")?.remove();
    answerBox.box.append(this.box);
  }

  update(text) {
    this.growing.update(parts({ content: text }).said);
  }

  /** Say whether the texts are the same, letter for letter; speeds where they can be compared. */
  judge(answer, plain, speeds) {
    const isSame = answer.content === plain.content;
    this.text.replaceChildren(rendered(parts(plain).said));
    typeset(this.text);
    this.box.classList.add(isSame ? "same" : "other");
    const ratio = speeds && (speeds.answer / speeds.plain).toFixed(2);
    const times = speeds ? ` ${ratio} times as fast as plain (${speeds.plain.toFixed(1)} tokens/s).` : "";
    if (isSame) {
      this.head.textContent = `✓ Identical: all ${answer.content.length} characters.${times}`;
      const folded = element("details");
      folded.append(element("summary", "", "The text, decoded plainly"), this.text);
      this.box.append(folded);
      return;
    }
    const moved = answer.fingerprint !== plain.fingerprint ? " The server has changed since." : "";
    this.head.textContent = `✗ The texts differ from character ${firstDifference(answer.content, plain.content)} on.${moved}`;
  }

  fail(words) {
    this.head.textContent = words;
  }
}

function firstDifference(one, other) {
  let place = 0;
  while (place < one.length && one[place] === other[place]) place++;
  return place;
}
