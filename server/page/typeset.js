// Formulas set by KaTeX and code coloured by highlight.js: fetched from the server once an answer has some.

import DOMPurify from "./vendor/purify.js";

const LONGEST_CODE = 100_000;
const BOUNDS = { throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 500 };
const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
const tools = { formula: null, code: null };
const fetched = { formula: null, code: null };

/** Typeset what stands in an element. What is not fetched yet comes later: `done` is called then. */
export function typeset(root, done = () => null) {
  const wanted = [
    ["formula", "code.formula", setFormula],
    ["code", "pre code[class^='language-']", colourCode],
  ];
  for (const [kind, selector, set] of wanted) {
    const found = [...root.querySelectorAll(selector)];
    if (!found.length) continue;
    if (tools[kind]) found.forEach(set);
    else fetchTool(kind).then(() => tools[kind] && setLater(root, found, set, done));
  }
}

function setLater(root, found, set, done) {
  found.forEach(set);
  if (root.isConnected) done();
}

/** A text stays as it was written where its tool cannot be had: the server may be gone. */
function fetchTool(kind) {
  fetched[kind] ??= (kind === "formula" ? fetchKatex() : fetchHighlight()).catch((error) => {
    fetched[kind] = null;
    if (!(error instanceof TypeError)) throw error;
  });
  return fetched[kind];
}

async function fetchKatex() {
  await Promise.all([import("./vendor/katex.js"), styled(new URL("./vendor/katex.css", import.meta.url))]);
  tools.formula = self.katex;
}

async function fetchHighlight() {
  tools.code = (await import("./vendor/highlight.js")).default;
}

function styled(url) {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = url;
  return new Promise((resolve, reject) => {
    link.onload = resolve;
    link.onerror = () => reject(new TypeError(`${url} was not found`));
    document.head.append(link);
  });
}

/** What TeX does not read stays as it was written. */
function setFormula(code) {
  const box = document.createElement("span");
  box.className = code.className;
  box.dataset.tex = code.textContent;
  const isBlock = code.classList.contains("block");
  try {
    const tree = tools.formula.__renderToDomTree(code.textContent, { ...BOUNDS, displayMode: isBlock });
    withoutStyles(tree);
    box.append(tree.toNode());
  } catch (error) {
    if (!(error instanceof tools.formula.ParseError)) throw error;
    return;
  }
  if (isBlock) {
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Formula");
  }
  code.replaceWith(box);
}

/** Style attributes stand in unseen nodes only, and the page's policy refuses them. */
function withoutStyles(node) {
  if (node.attributes?.style) delete node.attributes.style;
  node.children?.forEach(withoutStyles);
}

function colourCode(code) {
  const language = code.className.slice("language-".length);
  if (!tools.code.getLanguage(language) || code.textContent.length > LONGEST_CODE) return;
  const { value } = tools.code.highlight(code.textContent, { language, ignoreIllegals: true });
  code.replaceChildren(DOMPurify.sanitize(value, COLOURS));
}
