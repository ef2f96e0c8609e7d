// The list of chats: opens one, and deletes one.

import { storedChats, removeChat, storeChat } from "./chat_store.js";
import { element } from "./format.js";

const at = (id) => document.getElementById(id);

const TITLE_LENGTH = 80;

export class ChatList {
  /** `currentId` returns the id of the chat on the page, which `open` replaces. `removed` is called behind a removal. */
  constructor({ currentId, open, removed }) {
    Object.assign(this, { currentId, open, removed });
    // Another tab may have changed the list since it was last open.
    at("chat-list").addEventListener("beforetoggle", ({ newState }) => newState === "open" && this.draw());
    at("chat-list").addEventListener("toggle", ({ newState }) => {
      at("chats").setAttribute("aria-expanded", String(newState === "open"));
    });
  }

  draw() {
    const chats = storedChats();
    at("no-chats").hidden = chats.length > 0;
    at("chat-rows").replaceChildren(...chats.map((chat) => this.#row(chat)));
  }

  #row(chat) {
    const title = titleOf(chat);
    const when = new Date(chat.saved).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const open = element("button", { type: "button", className: "chat-title" });
    open.append(element("span", { textContent: title }), element("small", { textContent: when }));
    if (chat.id === this.currentId()) {
      open.setAttribute("aria-current", "true");
    }
    open.addEventListener("click", () => {
      at("chat-list").hidePopover();
      this.open(chat);
    });
    const remove = element("button", { type: "button", textContent: "Delete" });
    remove.setAttribute("aria-label", `Delete “${title}”`);
    const row = element("li", {}, open, remove);
    remove.addEventListener("click", () => this.#remove(chat, row));
    return row;
  }

  #remove(chat, row) {
    removeChat(chat.id);
    this.removed(chat);
    const undo = element("button", { type: "button", textContent: "Undo" });
    undo.addEventListener("click", () => {
      storeChat(chat);
      this.draw();
    });
    row.replaceChildren(element("span", { className: "quiet", textContent: "Deleted." }), undo);
    undo.focus();
  }
}

/** The beginning of the first message. */
function titleOf({ messages }) {
  const text = messages[0]?.content.trim().replaceAll(/\s+/g, " ") ?? "";
  return text.length > TITLE_LENGTH ? `${text.slice(0, TITLE_LENGTH)}…` : text || "Empty chat";
}
