// A text that grows: blocks that are complete are rendered once, only the last one again with every drawing.

import { element } from "./elements.js";
import { renderedParts } from "./markdown.js";
import { typeset } from "./typeset.js";

export class Growing {
  /** `paint(root, place)` colours what is rendered in `root`; it stands from `place` on in the answer's content. */
  constructor(root, paint = () => null) {
    this.root = root;
    this.paint = paint;
    this.reset();
  }

  reset() {
    this.length = 0;
    this.tail = element("div", "tail");
    this.root.replaceChildren(this.tail);
  }

  /** Show a text that goes on where the last one ended; `at` is its place in the answer's content, null outside it. */
  update(text, at = 0) {
    if (text.length < this.length) this.reset();
    const { settled, length, rest } = renderedParts(text.slice(this.length));
    const painted = (root, start) => at !== null && this.paint(root, at + start);
    if (length) {
      const block = element("div");
      const start = this.length;
      block.append(settled);
      this.tail.before(block);
      typeset(block, () => painted(block, start));
      painted(block, start);
      this.length += length;
    }
    this.tail.replaceChildren(rest);
    painted(this.tail, this.length);
  }
}
