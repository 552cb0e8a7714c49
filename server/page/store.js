// Conversations, kept in this browser only.
//
// A message is {role, content}; an answer also has `runs` ([characters, source, tokens] in order), `figures` and `note`.

const CONVERSATIONS = "mirrorsd.conversations";
const CURRENT = "mirrorsd.current";
const TITLE_LENGTH = 48;

export class Store {
  constructor() {
    this.conversations = read(CONVERSATIONS, []);
    this.currentId = localStorage.getItem(CURRENT);
    if (!this.current) this.open(this.conversations[0]?.id ?? this.add().id);
  }

  get current() {
    return this.conversations.find((one) => one.id === this.currentId);
  }

  add() {
    const empty = this.conversations.find((one) => one.messages.length === 0);
    if (empty) return empty;
    const settings = { ...(this.current?.settings ?? {}) };
    const made = { id: crypto.randomUUID?.() ?? String(Math.random()), title: "", settings, messages: [] };
    this.conversations.unshift(made);
    return made;
  }

  open(id) {
    this.currentId = id;
    localStorage.setItem(CURRENT, id);
  }

  remove(id) {
    this.conversations = this.conversations.filter((one) => one.id !== id);
    if (this.currentId === id) this.open(this.conversations[0]?.id ?? this.add().id);
    return this.save();
  }

  title(conversation) {
    const said = conversation.messages.find((message) => message.role === "user")?.content ?? "";
    const line = said.trim().split("\n")[0];
    const short = line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH)}…` : line;
    return conversation.title || short || "New conversation";
  }

  /** Whether everything could be kept: a browser gives a page a few megabytes. */
  save() {
    try {
      localStorage.setItem(CONVERSATIONS, JSON.stringify(this.conversations));
      return true;
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
      return false;
    }
  }
}

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    return otherwise;
  }
}
