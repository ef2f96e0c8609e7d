// The chats that the browser keeps, newest first. They are kept without tokens, which would take most of the room.

import { readJson, writeJson } from "./storage.js";

const KEY = "corella.chats";

/** The oldest chat is dropped for a new one. */
const MAX_CHATS = 50;

/** `{ id, saved, messages }` each. `saved` is a time in milliseconds since 1970. */
export function storedChats() {
  const stored = readJson("browser", KEY);
  return Array.isArray(stored) ? stored.filter((chat) => Array.isArray(chat?.messages)) : [];
}

export const findChat = (id) => storedChats().find((chat) => chat.id === id);

/** Takes the place of an older version. Where the storage is full, the oldest chats are dropped. */
export function storeChat(chat) {
  const chats = [chat, ...storedChats().filter((other) => other.id !== chat.id)];
  chats.sort((one, other) => other.saved - one.saved);
  chats.length = Math.min(chats.length, MAX_CHATS);
  while (chats.length > 0 && !writeJson("browser", KEY, chats)) {
    chats.pop();
  }
}

export function removeChat(id) {
  writeJson("browser", KEY, storedChats().filter((chat) => chat.id !== id));
}
