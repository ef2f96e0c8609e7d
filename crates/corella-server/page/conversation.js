// The conversation, kept in the storage of the tab and in the browser's list of chats. A new tab begins with a copy of the
// one that was saved last.

import { withFiles } from "./attachments.js";
import { findChat, storeChat } from "./chat_store.js";
import { readJson, writeJson } from "./storage.js";

const KEY = "corella.conversation";

/** Which chat of the list the conversation is, `{ id, saved }`. */
const CHAT_KEY = "corella.chat";

const newChat = () => ({ id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, saved: 0 });

/** Alternatives take most of the room, so only the newest messages keep them. */
const MAX_MESSAGES_WITH_TOKENS = 6;

/**
 * A message is `{ role, content }`. One of the user may have `files` (`{ name, text }` each). An answer also has `model`,
 * `reasoning`, `tokens` (`[text, logprob, [[text, logprob], …]]` each), `note` about how it went, and `error` if it failed.
 */
export class Conversation {
  /** `saved` is called when the list of chats has changed. */
  constructor(saved) {
    this.saved = saved;
    const area = readJson("tab", KEY) ? "tab" : "browser";
    this.messages = checked(readJson(area, KEY));
    this.chat = readJson(area, CHAT_KEY) ?? newChat();
    /** The `messages` and `chat` that were cleared last, until something is said. */
    this.cleared = null;
  }

  /** Keeps what was said, in the list as well. `last` may stand in for the last message. */
  save(last = this.messages.at(-1)) {
    const messages = this.messages.length === 0 ? [] : [...this.messages.slice(0, -1), last];
    if (messages.length > 0) {
      this.#list(messages.map(withoutTokens));
    }
    this.#keep(messages);
  }

  /** Keeps the conversation for this tab and the next one. */
  #keep(messages) {
    const firstWithTokens = messages.length - MAX_MESSAGES_WITH_TOKENS;
    const kept = messages.map((message, at) => (at < firstWithTokens ? withoutTokens(message) : message));
    for (const area of ["tab", "browser"]) {
      writeJson(area, CHAT_KEY, this.chat);
      if (!writeJson(area, KEY, kept)) {
        writeJson(area, KEY, messages.map(withoutTokens));
      }
    }
    this.saved();
  }

  #list(messages) {
    const stored = findChat(this.chat.id);
    if (stored && stored.saved !== this.chat.saved) {
      // Another tab went on with this chat. Both versions are kept.
      this.chat = newChat();
    }
    this.chat.saved = Math.max(Date.now(), this.chat.saved + 1);
    storeChat({ title: stored?.title, ...this.chat, messages });
  }

  /** Ends with the user's message, which is kept whatever becomes of its answer. */
  say(text, files) {
    this.cleared = null;
    this.messages.push({ role: "user", content: text, ...(files.length > 0 && { files }) });
    this.save();
  }

  clear() {
    if (this.messages.length > 0) {
      this.cleared = { messages: this.messages, chat: this.chat };
    }
    this.messages = [];
    this.chat = newChat();
    this.#keep([]);
  }

  undoClear() {
    Object.assign(this, this.cleared);
    this.cleared = null;
    this.save();
  }

  /** Goes on with a chat of the list. */
  open({ id, saved, messages }) {
    this.messages = checked(messages);
    this.chat = { id, saved };
    this.cleared = null;
    this.#keep(this.messages);
  }

  /** Cuts off a message and all after it. */
  cut(message) {
    this.messages.splice(this.messages.indexOf(message));
    this.save();
  }

  /** What is sent. A message of the user that got no answer is left out, because templates want turns to alternate. */
  forModel(system) {
    const said = [];
    for (const message of this.messages) {
      const { role } = message;
      const content = withFiles(message);
      if (content === "") {
        continue;
      }
      if (role === "user" && said.at(-1)?.role === "user") {
        said.pop();
      }
      said.push({ role, content });
    }
    return system.trim() === "" ? said : [{ role: "system", content: system }, ...said];
  }
}

const withoutTokens = (message) => ({ ...message, tokens: undefined });

const checked = (stored) => (Array.isArray(stored) ? stored : []).filter((message) => typeof message?.content === "string");
