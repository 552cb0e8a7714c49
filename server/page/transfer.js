// Conversations as files: JSON holds everything, Markdown what was said. Both can be read again.

import { newId } from "./store.js";

const NAME = "mirrorsd";
const HEADINGS = { user: "## You", assistant: "## Answer" };

/** A file of conversations, {name, type, text}. */
function fileOf(conversations, kind, store) {
  if (kind === "json") {
    return { name: `${NAME}.json`, type: "application/json", text: JSON.stringify({ mirrorsd: 1, conversations }, null, 1) };
  }
  const named = conversations.map((one) => ({ title: store.title(one), messages: one.messages }));
  const mark = markFor(named);
  const text = named.map((one) => asMarkdown(one, mark)).join("");
  return { name: `${NAME}.md`, type: "text/markdown", text };
}

/** Give a file to the reader. */
function save({ name, type, text }) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Conversations of files, and why some were not read. */
async function readFiles(files) {
  const found = [];
  const refused = [];
  for (const file of files) {
    try {
      const text = await file.text();
      found.push(...(/\.json$/i.test(file.name) ? ofJson(text) : ofMarkdown(text)));
    } catch (error) {
      if (!(error instanceof SyntaxError || error instanceof DOMException)) throw error;
      refused.push(`${file.name}: ${error.message}`);
    }
  }
  return { found, refused };
}

/** What begins a comment that no conversation holds: an answer may have headings, and look like a turn itself. */
function markFor(conversations) {
  const said = JSON.stringify(conversations);
  let number = 1;
  while (said.includes(`<!-- ${NAME} ${number} `)) number += 1;
  return `<!-- ${NAME} ${number} `;
}

function asMarkdown({ title, messages }, mark) {
  const said = messages.map(({ role, content }) => `${mark}${role} -->\n${HEADINGS[role]}\n\n${content}\n\n`);
  return [`${mark}title -->\n# ${title.replaceAll("\n", " ")}\n\n`, ...said].join("");
}

/** Turns stand behind their comments; a file without such comments is read by its headings. */
function ofMarkdown(written) {
  const text = /^<!-- mirrorsd \d+ title -->\r\n/.test(written) ? written.replaceAll("\r\n", "\n") : written; // an editor's line ends
  const mark = /^<!-- mirrorsd \d+ (?=title -->\n)/.exec(text)?.[0];
  if (!mark) return byHeadings(text);
  const found = [];
  for (const part of text.split(mark).slice(1)) {
    const title = /^title -->\n# (.*)/.exec(part);
    const [, role, content] = /^(user|assistant) -->\n.*\n\n([^]*?)(?:\n{1,2})?$/.exec(part) ?? [];
    if (title) found.push({ title: title[1], messages: [] });
    else found.at(-1).messages.push({ role, content });
  }
  return found.map(checked);
}

function byHeadings(text) {
  const found = text.split(/^# /m).slice(1);
  if (!found.length) throw new SyntaxError("it holds no heading of a conversation, `# …`");
  return found.map((part) => {
    const [head, ...rest] = part.split(/^(?=## (?:You|Answer)$)/m);
    const messages = rest.map((one) => {
      const role = one.startsWith(HEADINGS.user) ? "user" : "assistant";
      return { role, content: one.slice(one.indexOf("\n") + 1).trim() };
    });
    return checked({ title: head.trim(), messages });
  });
}

function ofJson(text) {
  const document = JSON.parse(text);
  const listed = Array.isArray(document) ? document : document?.conversations;
  if (!Array.isArray(listed)) throw new SyntaxError("it holds no list of conversations");
  return listed.map(checked);
}

/** A conversation in the form of the page, whatever a file says: words are kept, everything else is made anew. */
function checked(one) {
  const said = Array.isArray(one?.messages) ? one.messages : [];
  if (!said.length) throw new SyntaxError("a conversation has no messages");
  const messages = said.map((message) => {
    if (!["user", "assistant"].includes(message?.role) || typeof message.content !== "string") {
      throw new SyntaxError("a message is not {role, content} of user or assistant");
    }
    const runs = Array.isArray(message.runs) && message.runs.every(isRun) ? message.runs : [];
    const figures = areFigures(message.figures) ? message.figures : null;
    const { role, content } = message;
    const reasoning = typeof message.reasoning === "string" ? message.reasoning : "";
    return { id: newId(), role, content, reasoning, runs, figures, note: String(message.note ?? ""), model: String(message.model ?? "") };
  });
  const settings = one.settings && typeof one.settings === "object" ? Object.entries(one.settings).filter(([, value]) => isPlain(value)) : [];
  return { title: String(one.title ?? ""), settings: Object.fromEntries(settings), messages };
}

function areFigures(figures) {
  return [figures?.predicted_n, figures?.tokens_per_second ?? figures?.predicted_per_second].every(Number.isFinite);
}

function isPlain(value) {
  return Array.isArray(value) ? value.every((one) => typeof one === "string") : typeof value !== "object" || value === null;
}

function isRun(run) {
  return Array.isArray(run) && Number.isFinite(run[0]) && typeof run[1] === "string" && Number.isFinite(run[2]);
}

/** The buttons that save and read conversations; `kept` acts on what is kept, `shown` is called when some were read. */
export function setUpTransfer(byId, store, kept, shown) {
  byId("export").addEventListener("click", () => save(fileOf(store.conversations.filter((one) => one.messages.length), "json", store)));
  byId("export-text").addEventListener("click", () => save(fileOf([store.current], "md", store)));
  byId("import").addEventListener("change", async (event) => {
    const { found, refused } = await readFiles(event.target.files);
    const count = await kept(() => store.import(found));
    const words = `${found.length} ${found.length === 1 ? "conversation" : "conversations"} read.`;
    if (count !== null) byId("state").textContent = refused.length ? `${words} Not read: ${refused.join("; ")}` : words;
    event.target.value = "";
    shown();
  });
}
