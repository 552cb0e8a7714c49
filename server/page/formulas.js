// Formulas in markdown, as models write them: $a$, \(a\), $$a$$, \[a\] and \begin{…}. What they look like is `typeset.js`.

// A sum of money is no formula: "$5 and $10" has a space before its second sign, "$5-$10" a digit behind it.
const INLINE = /^(?:\\\(((?:(?!\\\)|\n[ \t]*\n)[^])+)\\\)|(\$\$)((?:(?!\$\$|\n[ \t]*\n)[^])+)\$\$|\$(?![\s$])((?:\\[^\n]|[^$\\\n])*(?:\\[^\n]|[^$\\\s]))\$(?![\d$]))/;
const BLOCK = /^ {0,3}(?:\$\$((?:(?!\$\$|\n[ \t]*\n)[^])+)\$\$|\\\[((?:(?!\\\]|\n[ \t]*\n)[^])+)\\\]|(\\begin\{([a-z]+\*?)\}(?:(?!\n[ \t]*\n)[^])+?\\end\{\4\}))[ \t]*(?:\n|$)/;

function asCode(tex, name) {
  const escaped = tex.replace(/[&<>"']/g, (sign) => `&#${sign.codePointAt(0)};`);
  return `<code class="${name}">${escaped}</code>`;
}

/** Where a line begins a whole formula, which then ends the paragraph before it. */
function firstBlock(text) {
  const [paragraph] = text.split(/\n[ \t]*\n/, 1);
  for (const { index } of paragraph.matchAll(/\n(?= {0,3}(?:\$\$|\\\[|\\begin\{))/g)) {
    if (BLOCK.test(paragraph.slice(index + 1))) return index + 1;
  }
  return undefined;
}

/** For `marked`: an unfinished formula is text, and no formula goes on beyond an empty line. */
export const formulas = [
  {
    name: "formulaBlock",
    level: "block",
    start: firstBlock,
    tokenizer(text) {
      const found = BLOCK.exec(text);
      return found ? { type: "formulaBlock", raw: found[0], tex: (found[1] ?? found[2] ?? found[3]).trim() } : undefined;
    },
    renderer: ({ tex }) => `<p>${asCode(tex, "formula block")}</p>`,
  },
  {
    name: "formula",
    level: "inline",
    start: (text) => text.match(/\$|\\\(/)?.index,
    tokenizer(text) {
      const found = INLINE.exec(text);
      if (!found) return undefined;
      return { type: "formula", raw: found[0], tex: (found[1] ?? found[3] ?? found[4]).trim(), isBlock: Boolean(found[2]) };
    },
    renderer: ({ tex, isBlock }) => asCode(tex, isBlock ? "formula block" : "formula"),
  },
];
