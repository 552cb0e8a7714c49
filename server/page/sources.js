// Which words came from where, as colours on the rendered text and as counts.

export const SOURCES = ["window", "lookup", "correction", "plain"];
const FAR = 400;

/** Runs [characters, source, tokens]: adjacent tokens of one source become one. */
export function addTokens(runs, tokens) {
  for (const [text, source] of tokens) {
    const last = runs.at(-1);
    if (last && last[1] === source) {
      last[0] += text.length;
      last[2] += 1;
    } else {
      runs.push([text.length, source, 1]);
    }
  }
}

/** Tokens by source. */
export function counted(runs) {
  const counts = Object.fromEntries(SOURCES.map((source) => [source, 0]));
  for (const [, source, tokens] of runs) counts[source] = (counts[source] ?? 0) + tokens;
  return counts;
}

/** Text nodes, and elements that stand for a text of their own (`data-tex`); what is in these, and buttons, is no text. */
function shownIn(root) {
  return document.createTreeWalker(root, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT, (node) => {
    if (node.nodeType === Node.TEXT_NODE || node.dataset?.tex !== undefined) return NodeFilter.FILTER_ACCEPT;
    const isNone = node.nodeName === "BUTTON" || node.parentElement.dataset?.tex !== undefined;
    return isNone ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_SKIP;
  });
}

/**
 * Ranges by source of the text nodes under `root`, which show `text` from `place` on.
 *
 * Markup that the text was written with has no place on the page and is passed over.
 */
export function ranges(root, text, runs, place = 0) {
  const found = Object.fromEntries(SOURCES.map((source) => [source, []]));
  const walker = shownIn(root);
  let run = 0;
  let runEnd = runs.length ? runs[0][0] : 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.nodeType !== Node.TEXT_NODE) {
      const start = text.indexOf(node.dataset.tex, place);
      if (start >= 0) place = start + node.dataset.tex.length;
      continue;
    }
    let begun = null;
    for (let offset = 0; offset < node.data.length; offset++) {
      if (/\s/.test(node.data[offset])) continue;
      const next = text.indexOf(node.data[offset], place);
      if (next < 0 || next - place > FAR) continue;
      place = next + 1;
      while (run < runs.length - 1 && next >= runEnd) runEnd += runs[++run][0];
      const source = runs[run]?.[1];
      if (begun && begun.source === source) begun.end = offset + 1;
      else {
        close(found, node, begun);
        begun = { source, start: offset, end: offset + 1 };
      }
    }
    close(found, node, begun);
  }
  return found;
}

function close(found, node, begun) {
  if (!begun || !found[begun.source]) return;
  const range = new Range();
  range.setStart(node, begun.start);
  range.setEnd(node, begun.end);
  found[begun.source].push(range);
}

/**
 * Colours of the answers, through highlights: the page's structure stays what a screen reader needs.
 *
 * A browser goes through all ranges of its highlights with every drawing, so only what is near the view has some.
 */
export class Colours {
  constructor(list) {
    this.isOn = true;
    this.painted = new Map(); // by element: {text, runs, place, found}
    this.canHighlight = typeof Highlight !== "undefined" && "highlights" in CSS;
    if (!this.canHighlight) return;
    this.highlights = Object.fromEntries(SOURCES.map((source) => [source, new Highlight()]));
    for (const source of SOURCES) CSS.highlights.set(`source-${source}`, this.highlights[source]);
    const seen = (entries) => entries.forEach(({ target, isIntersecting }) => this.#see(target, isIntersecting));
    this.near = new IntersectionObserver(seen, { root: list, rootMargin: "800px 0px" });
  }

  paint(root, text, runs, place = 0) {
    this.forget(root);
    if (!this.canHighlight || !this.isOn || !runs?.length) return;
    this.painted.set(root, { text, runs, place, found: null });
    this.#see(root, true);
    this.near.observe(root);
  }

  forget(root) {
    if (!this.painted.has(root)) return;
    this.#see(root, false);
    this.near.unobserve(root);
    this.painted.delete(root);
  }

  /** Nothing in this element is shown any more. */
  forgetIn(element) {
    for (const root of [...this.painted.keys()]) if (element.contains(root)) this.forget(root);
  }

  #see(root, isNear) {
    const one = this.painted.get(root);
    if (!one || isNear === Boolean(one.found)) return;
    const found = one.found ?? ranges(root, one.text, one.runs, one.place);
    one.found = isNear ? found : null;
    for (const source of SOURCES) {
      for (const range of found[source]) this.highlights[source][isNear ? "add" : "delete"](range);
    }
  }
}
