// The conversation, kept in the storage of the tab and in the browser's list of chats. A new tab begins with a copy of
// the conversation that was saved last.

import { withFiles } from "./attachments.js";
import { findChat, storeChat } from "./chat_store.js";
import { readJson, writeJson } from "./storage.js";

const KEY = "corella.conversation";

/** The key of `{ id, saved }`: the conversation's entry in the list of chats. */
const CHAT_KEY = "corella.chat";

const newChat = () => ({ id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, saved: 0 });

/** Only the newest messages keep their tokens with alternatives, which take most of the storage. */
const MAX_MESSAGES_WITH_TOKENS = 6;

/**
 * A message is `{ role, content }`. A message of the user may have `files` (`{ name, text }` each). An answer also has
 * `model`, `reasoning`, `tokens` (`[text, logprob, [[text, logprob], …]]` each), a `note` with its times, and `error` if
 * it failed.
 */
export class Conversation {
  /** `saved` is called when the list of chats has changed. */
  constructor(saved) {
    this.saved = saved;
    const area = readJson("tab", KEY) ? "tab" : "browser";
    this.messages = checked(readJson(area, KEY));
    this.chat = readJson(area, CHAT_KEY) ?? newChat();
    /** The `messages` and `chat` that were cleared last, until the user sends a message. */
    this.cleared = null;
  }

  /** Saves the conversation for the tab and in the list of chats, with `last` as its last message. */
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
      // Another tab has continued this chat. Both versions are kept.
      this.chat = newChat();
    }
    this.chat.saved = Math.max(Date.now(), this.chat.saved + 1);
    storeChat({ title: stored?.title, ...this.chat, messages });
  }

  /** Adds the user's message, which is saved even if its answer fails. */
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

  /** Continues a chat of the list. */
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

  /** Returns the messages to send. A user's message without an answer is left out: templates want alternating turns. */
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
