// Conversations, kept in this browser only: one record each, in its database, so that tabs never overwrite each other.
//
// A message is {id, role, content}; an answer also has `runs` ([characters, source, tokens] in order), `figures`, `note`,
// and while it comes `pending`, the id by which the server keeps it.

const DATABASE = "mirrorsd";
const TABLE = "conversations";
const CURRENT = "mirrorsd.current";
const OLD = "mirrorsd.conversations";
const TITLE_LENGTH = 48;
const CLEARED_MS = 250; // while it clears, a browser closes what is opened anew

export function newId() {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Store {
  /** Open what is kept; `changed` is called with an id when another tab has changed, added or removed a conversation. */
  static async open(changed) {
    const store = new Store();
    await store.#read(changed);
    await store.#takeOld();
    store.channel = new BroadcastChannel(DATABASE);
    store.channel.onmessage = async ({ data: id }) => {
      await store.#refresh(id);
      changed(id);
    };
    store.currentId = sessionStorage.getItem(CURRENT);
    if (!store.current) store.select(store.conversations[0]?.id ?? store.add().id);
    return store;
  }

  get current() {
    return this.of(this.currentId);
  }

  of(id) {
    return this.conversations.find((one) => one.id === id);
  }

  /** An empty conversation that is not one of `begun`; it is kept once something is said. */
  add(begun = []) {
    const empty = this.conversations.find((one) => one.messages.length === 0 && !begun.includes(one.id));
    if (empty) return empty;
    const settings = { ...(this.current?.settings ?? {}) };
    const made = { id: newId(), title: "", settings, messages: [], touched: Date.now() };
    this.conversations.unshift(made);
    return made;
  }

  /** Each tab has its own. */
  select(id) {
    this.currentId = id;
    sessionStorage.setItem(CURRENT, id);
  }

  async remove(id) {
    this.conversations = this.conversations.filter((one) => one.id !== id);
    if (this.currentId === id) this.select(this.conversations[0]?.id ?? this.add().id);
    await this.#done("readwrite", (table) => table.delete(id));
    this.channel.postMessage(id);
  }

  /** Change a conversation as it is kept now, whichever tab wrote it last; `isQuiet` tells no other tab. */
  async change(id, act, isQuiet = false) {
    const shown = this.of(id);
    let changed = null;
    await this.#done("readwrite", (table) => {
      const asked = table.get(id);
      asked.onsuccess = () => {
        changed = asked.result ?? (shown && !shown.messages.length ? structuredClone(shown) : null);
        if (!changed) return;
        act(changed);
        if (!isQuiet) changed.touched = Date.now();
        table.put(changed);
      };
      return asked;
    });
    if (!changed) return null;
    this.#take(changed);
    if (!isQuiet) this.channel.postMessage(id);
    return this.of(id);
  }

  /** Add whole conversations, as an import has them: each gets an id of its own. Their number. */
  async import(conversations) {
    for (const [place, one] of [...conversations].reverse().entries()) {
      const made = { ...one, id: newId(), touched: Date.now() + place }; // the first one was the last to be touched
      await this.#done("readwrite", (table) => table.put(made));
      this.#take(made);
      this.channel.postMessage(made.id);
    }
    return conversations.length;
  }

  title(conversation) {
    const said = conversation.messages.find((message) => message.role === "user")?.content ?? "";
    const line = said.trim().split("\n")[0];
    const short = line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH)}…` : line;
    return conversation.title || short || "New conversation";
  }

  /** Those that hold these words, in title or text. */
  found(words) {
    const wanted = words.trim().toLowerCase();
    if (!wanted) return this.conversations;
    const says = (one) => [this.title(one), ...one.messages.map((message) => message.content)];
    return this.conversations.filter((one) => says(one).some((text) => text.toLowerCase().includes(wanted)));
  }

  /** Read what is kept, and once more after the browser has closed its database: its data may have been cleared. */
  async #read(changed) {
    const again = async () => {
      await this.#read(changed);
      if (!this.current) this.select(this.conversations[0]?.id ?? this.add().id);
      changed(this.currentId);
    };
    this.database = await opened();
    this.database.onclose = () => setTimeout(again, CLEARED_MS);
    this.conversations = sorted(await this.#done("readonly", (table) => table.getAll()));
  }

  #take(record) {
    const place = this.conversations.findIndex((one) => one.id === record.id);
    if (place < 0) this.conversations.unshift(record);
    else this.conversations[place] = record;
  }

  async #refresh(id) {
    const record = await this.#done("readonly", (table) => table.get(id));
    if (record) this.#take(record);
    else this.conversations = this.conversations.filter((one) => one.id !== id || !one.messages.length);
    if (!this.current) this.select(this.conversations[0]?.id ?? this.add().id);
  }

  /** What a transaction on the table gives, once it is written. */
  #done(mode, act) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(TABLE, mode);
      const asked = act(transaction.objectStore(TABLE));
      transaction.oncomplete = () => resolve(asked.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }

  /** Conversations that an older page kept as one text. */
  async #takeOld() {
    let old = [];
    try {
      old = [JSON.parse(localStorage.getItem(OLD))].flat();
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
    }
    for (const [place, one] of old.filter((one) => Array.isArray(one?.messages) && one.messages.length).entries()) {
      const messages = one.messages.map((message) => ({ id: newId(), ...message }));
      const made = { ...one, messages, touched: Date.now() - place };
      await this.#done("readwrite", (table) => table.put(made));
      this.conversations.push(made);
    }
    localStorage.removeItem(OLD);
  }
}

function sorted(conversations) {
  return conversations.sort((one, other) => other.touched - one.touched);
}

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(DATABASE, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(TABLE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}
