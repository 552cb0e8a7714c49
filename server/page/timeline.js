// Both devices at work, drawn on a canvas: a lane for each, the last moments while an answer comes, any moment after.

export const WORK = {
  prefill: ["reads the question", "--work-prefill"],
  verify: ["large model: checks words", "--work-verify"],
  exit: ["its early guess", "--work-exit"],
  draft: ["small model: drafts ahead", "--work-draft"],
  wait: ["waits for the draft", "--work-wait"],
};
const LANES = ["target", "draft"];
const NAMES = { target: "large", draft: "small" };
const STEPS_SHOWN = 10;
const LEFT = 44;

function kind(device, name) {
  if (name === "prefill") return "prefill";
  if (name === "exposed") return "wait";
  if (device === "draft") return "draft";
  return name.startsWith("exit") ? "exit" : device === "target" && name !== "read" ? "verify" : null;
}

export class Timeline {
  constructor(canvas, slider) {
    this.canvas = canvas;
    this.slider = slider;
    this.spans = [];
    this.reset();
    slider.addEventListener("input", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  reset() {
    this.spans = [];
    this.end = 0;
    this.begin = 0;
    this.slider.disabled = true;
    this.slider.value = 1000;
    this.draw();
  }

  /** Take spans in; `draw` shows them. */
  add(spans) {
    for (const [device, name, start, end] of spans) {
      const found = kind(device, name);
      if (!found) continue;
      this.spans.push({ lane: found === "wait" ? "target" : device, kind: found, start, end });
      this.end = Math.max(this.end, end);
    }
  }

  /** The answer is complete: any moment can be looked at. */
  finish(words) {
    this.slider.disabled = this.spans.length === 0;
    this.canvas.setAttribute("aria-label", words);
    this.draw();
  }

  /** Milliseconds shown: about ten passes of the large model. */
  get length() {
    const passes = this.spans.filter((span) => span.kind === "verify").slice(-200);
    if (!passes.length) return Math.max(this.end, 1);
    const lengths = passes.map((span) => span.end - span.start).sort((a, b) => a - b);
    return Math.min(this.end, Math.max(2 * STEPS_SHOWN * lengths[lengths.length >> 1], 4));
  }

  draw() {
    const scale = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width) return;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(this.canvas);
    const length = this.length;
    const first = Math.max(0, (this.end - length) * (this.slider.value / 1000));
    const laneHeight = (height - 24) / LANES.length;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    LANES.forEach((lane, row) => {
      const top = row * laneHeight + 4;
      pen.fillStyle = style.getPropertyValue("--lane");
      pen.fillRect(LEFT, top, width - LEFT, laneHeight - 8);
      pen.fillStyle = style.getPropertyValue("--ink-soft");
      pen.fillText(NAMES[lane], 0, top + (laneHeight - 8) / 2);
    });
    const across = (ms) => LEFT + ((ms - first) / length) * (width - LEFT);
    for (const span of this.spans) {
      if (span.end < first || span.start > first + length) continue;
      const x = Math.max(across(span.start), LEFT);
      const top = LANES.indexOf(span.lane) * laneHeight + 4;
      pen.fillStyle = style.getPropertyValue(WORK[span.kind][1]);
      pen.fillRect(x, top, Math.max(Math.min(across(span.end), width) - x - 0.5, 1), laneHeight - 8);
    }
    pen.fillStyle = style.getPropertyValue("--ink-soft");
    if (!this.spans.length) return;
    pen.fillText(time(first), LEFT, height - 8);
    const last = time(first + length);
    pen.fillText(last, width - pen.measureText(last).width, height - 8);
  }
}

function time(ms) {
  return ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(0)} ms`;
}
