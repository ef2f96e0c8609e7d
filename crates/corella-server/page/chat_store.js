// The chats that the browser keeps, newest first. They are kept without tokens, which would take most of the room.

import { readJson, writeJson } from "./storage.js";

const KEY = "corella.chats";

/** Limits the chats. Beyond the limit, the oldest chat is dropped. */
const MAX_CHATS = 200;

const TITLE_LENGTH = 80;

/** Each chat is `{ id, saved, title, messages }`. `saved` is in milliseconds since 1970; the user gives a `title`. */
export function storedChats() {
  const stored = readJson("browser", KEY);
  return Array.isArray(stored) ? stored.filter((chat) => Array.isArray(chat?.messages)) : [];
}

export const findChat = (id) => storedChats().find((chat) => chat.id === id);

/** Saves a chat in place of its older version. If the storage is full, the oldest chats are dropped. */
export function storeChat(chat) {
  const chats = [chat, ...storedChats().filter((other) => other.id !== chat.id)];
  chats.sort((one, other) => other.saved - one.saved);
  chats.length = Math.min(chats.length, MAX_CHATS);
  while (chats.length > 0 && !writeJson("browser", KEY, chats)) {
    chats.pop();
  }
}

export function renameChat(id, title) {
  writeJson("browser", KEY, storedChats().map((chat) => (chat.id === id ? { ...chat, title } : chat)));
}

export function removeChat(id) {
  writeJson("browser", KEY, storedChats().filter((chat) => chat.id !== id));
}

/** Returns the chat's title, or the beginning of its first message. */
export function titleOf({ title, messages }) {
  const [first] = messages;
  const text = title || first?.content.trim().replaceAll(/\s+/g, " ") || first?.files?.[0]?.name || "Empty chat";
  return text.length > TITLE_LENGTH ? `${text.slice(0, TITLE_LENGTH)}…` : text;
}
