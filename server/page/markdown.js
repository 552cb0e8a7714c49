// A model's text as markdown, made safe: what it writes is never markup of its own, and nothing is ever fetched.

import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";
import { formulas } from "./formulas.js";

const TAGS = [
  ..."p br hr h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code strong em del a".split(" "),
  ..."table thead tbody tr th td input".split(" "),
];
const RULES = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "start", "align", "type", "checked", "disabled", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

function escaped(text) {
  return text.replace(/[&<>"']/g, (sign) => `&#${sign.codePointAt(0)};`);
}

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: formulas,
  renderer: {
    html: ({ text, block }) => (block ? `<p class="markup">${escaped(text.trimEnd())}</p>` : escaped(text)),
    image: ({ text, href }) => escaped(`[image: ${text || href}]`),
  },
});

/** A fragment for the page. */
export function rendered(text) {
  return unlessTooDeep(text, () => clean(marked.parse(text)));
}

/** What is made of a text; the text itself where it is nested deeper than anybody can follow, as models that loop write. */
function unlessTooDeep(text, make) {
  try {
    return make();
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    const plain = document.createElement("pre");
    plain.textContent = text;
    const fragment = document.createDocumentFragment();
    fragment.append(plain);
    return fragment;
  }
}

/** A text that may go on: the blocks that no later letter changes and their length in letters, and the rest. */
export function renderedParts(text) {
  let parts;
  const rest = unlessTooDeep(text, () => (parts = partsOf(text)).rest);
  return parts ?? { settled: document.createDocumentFragment(), length: 0, rest };
}

function partsOf(text) {
  const tokens = marked.lexer(text);
  const last = tokens.findLastIndex((token) => token.type !== "space");
  const count = text.includes("\r") ? 0 : Math.max(last, 0); // the lexer counts such line ends otherwise
  const settled = tokens.slice(0, count);
  const length = settled.reduce((sum, token) => sum + token.raw.length, 0);
  return { settled: clean(marked.parser(settled)), length, rest: clean(marked.parser(tokens.slice(count))) };
}

function clean(html) {
  const fragment = DOMPurify.sanitize(html, RULES);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const box of fragment.querySelectorAll("input")) {
    box.type = "checkbox";
    box.disabled = true;
    box.setAttribute("aria-label", box.checked ? "done" : "not done");
  }
  for (const heading of fragment.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const lower = document.createElement("h3");
    lower.className = heading.tagName.toLowerCase();
    lower.append(...heading.childNodes);
    heading.replaceWith(lower);
  }
  for (const wide of fragment.querySelectorAll("table, pre")) scrollable(wide);
  return fragment;
}

function scrollable(wide) {
  const frame = document.createElement("div");
  frame.className = wide.tagName === "PRE" ? "code-frame" : "table-frame";
  frame.tabIndex = 0;
  frame.setAttribute("role", "group");
  frame.setAttribute("aria-label", wide.tagName === "PRE" ? "Code" : "Table");
  wide.replaceWith(frame);
  frame.append(wide);
}
