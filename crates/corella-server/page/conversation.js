// The conversation and its settings, kept in the browser's storage.

const KEY = "corella.conversation";
const SETTINGS = "corella.settings";

/** Alternatives take most of the room, so only the newest messages keep them. */
const MAX_MESSAGES_WITH_TOKENS = 6;

/**
 * A message is `{ role, content }`. An answer also has `reasoning`, `tokens` (`[text, logprob, [[text, logprob], …]]`
 * each), `note` about how it ended, and `error` if it failed.
 */
export class Conversation {
  constructor() {
    this.messages = read(KEY, []).filter((message) => typeof message?.content === "string");
  }

  save() {
    const firstWithTokens = this.messages.length - MAX_MESSAGES_WITH_TOKENS;
    const kept = this.messages.map((message, at) => (at < firstWithTokens ? { ...message, tokens: undefined } : message));
    if (!write(KEY, kept)) {
      write(KEY, this.messages.map((message) => ({ ...message, tokens: undefined })));
    }
  }

  clear() {
    this.messages = [];
    this.save();
  }

  /** What is sent: messages that have something to say. */
  forModel(system) {
    const said = this.messages.filter((message) => message.content !== "");
    const messages = said.map(({ role, content }) => ({ role, content }));
    return system.trim() === "" ? messages : [{ role: "system", content: system }, ...messages];
  }
}

export const readSettings = () => read(SETTINGS, {});
export const writeSettings = (settings) => write(SETTINGS, settings);

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** False when the storage is full or closed. */
function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
