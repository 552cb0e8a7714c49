// The panel beside the conversation: speed against plain, acceptance, the timeline, the legend.

import { percent, speedOf } from "./answering.js";
import { element } from "./elements.js";
import { WORDS } from "./messages.js";
import { SOURCES } from "./sources.js";
import { Timeline, WORK } from "./timeline.js";

const FRAME_MS = 100;

export class Panel {
  constructor(byId) {
    this.byId = byId;
    this.timeline = new Timeline(byId("timeline"), byId("moment"));
    this.plainSpeed = null;
    this.advice = "";
    this.begin();
    byId("work-keys").replaceChildren(
      ...Object.entries(WORK).map(([kind, [words]]) => {
        const item = element("li", "", words);
        item.prepend(element("span", `swatch work-${kind}`));
        return item;
      }),
    );
  }

  /** The legend: a sentence of the server's for each source. */
  explain(sources) {
    const rows = SOURCES.filter((source) => sources[source]).flatMap((source) => {
      const term = element("dt");
      term.append(element("span", `sample ${source}`, WORDS[source]));
      return [term, element("dd", "", sources[source])];
    });
    this.byId("legend").replaceChildren(...rows);
  }

  showPlain() {
    const known = `Plain decoding makes ${this.plainSpeed?.toFixed(1)} tokens/s here.`;
    const note = this.plainSpeed ? known : "“Compare with plain” measures how fast plain decoding is here.";
    this.byId("plain-note").textContent = this.advice ? `${note} ${this.advice.replaceAll("`", "")}` : note;
  }

  begin() {
    this.first = this.last = null;
    this.tokens = this.tokensAtFirst = 0;
    this.timeline.reset();
    this.set(null, null, null);
  }

  /** A chunk has come: count, and draw a few times a second. */
  take(chunk) {
    const now = performance.now();
    this.tokens += chunk.mirror_tokens?.length ?? 0;
    if (chunk.mirror_timeline) this.timeline.add(chunk.mirror_timeline);
    if (this.first === null && this.tokens) {
      this.first = now;
      this.tokensAtFirst = this.tokens;
    }
    if (now - (this.last ?? 0) < FRAME_MS) return;
    this.last = now;
    this.timeline.draw();
    if (this.first === null) return;
    const seconds = (now - this.first) / 1000;
    if (seconds > 0.2) this.set((this.tokens - this.tokensAtFirst) / seconds, null, null);
  }

  finish(figures) {
    if (!figures) {
      this.timeline.finish("The answer was stopped.");
      return;
    }
    this.show(figures);
    const overlap = `While the large model checked, the small one drafted: ${percent(figures.overlap)} of its work lay there.`;
    this.timeline.finish(`${figures.steps} steps of the large model, ${figures.predicted_n} tokens. ${overlap}`);
  }

  /** Figures of a finished answer. */
  show(figures) {
    const accepted = figures.draft_n ? figures.draft_n_accepted / figures.draft_n : null;
    this.set(speedOf(figures), accepted, figures.tokens_per_step, !figures.draft_n);
  }

  set(speed, accepted, perStep, isPlain = false) {
    const text = (id, words) => (this.byId(id).textContent = words);
    text("speed", speed === null ? "–" : speed.toFixed(speed < 100 ? 1 : 0));
    text("against-plain", speed === null || !this.plainSpeed || isPlain ? "–" : `${(speed / this.plainSpeed).toFixed(2)}×`);
    text("accepted", accepted === null ? "–" : percent(accepted));
    text("per-step", perStep === null ? "–" : perStep.toFixed(2));
  }

  draw() {
    this.timeline.draw();
  }
}
