// The conversation, kept in the storage of the tab. A new tab begins with a copy of the one that was saved last.

import { readJson, writeJson } from "./storage.js";

const KEY = "corella.conversation";

/** Alternatives take most of the room, so only the newest messages keep them. */
const MAX_MESSAGES_WITH_TOKENS = 6;

/**
 * A message is `{ role, content }`. An answer also has `reasoning`, `tokens` (`[text, logprob, [[text, logprob], …]]`
 * each), `note` about how it went, and `error` if it failed.
 */
export class Conversation {
  constructor() {
    const stored = readJson("tab", KEY) ?? readJson("browser", KEY);
    const messages = Array.isArray(stored) ? stored : [];
    this.messages = messages.filter((message) => typeof message?.content === "string");
    /** What was cleared last, until something is said. */
    this.cleared = null;
  }

  /** `last` may stand in for the last message. */
  save(last = this.messages.at(-1)) {
    const messages = this.messages.length === 0 ? [] : [...this.messages.slice(0, -1), last];
    const withoutTokens = (message) => ({ ...message, tokens: undefined });
    const firstWithTokens = messages.length - MAX_MESSAGES_WITH_TOKENS;
    const kept = messages.map((message, at) => (at < firstWithTokens ? withoutTokens(message) : message));
    for (const area of ["tab", "browser"]) {
      if (!writeJson(area, KEY, kept)) {
        writeJson(area, KEY, messages.map(withoutTokens));
      }
    }
  }

  /** Ends with the user's message, which is kept whatever becomes of its answer. */
  say(text) {
    this.cleared = null;
    this.messages.push({ role: "user", content: text });
    this.save();
  }

  clear() {
    if (this.messages.length > 0) {
      this.cleared = this.messages;
    }
    this.messages = [];
    this.save();
  }

  undoClear() {
    this.messages = this.cleared ?? this.messages;
    this.cleared = null;
    this.save();
  }

  /** Cuts off a message and all after it. */
  cut(message) {
    this.messages.splice(this.messages.indexOf(message));
    this.save();
  }

  /** What is sent. A message of the user that got no answer is left out, because templates want turns to alternate. */
  forModel(system) {
    const said = [];
    for (const { role, content } of this.messages) {
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
