// The side bar: the list of chats, to open, rename and delete them. On narrow screens it lies over the chat.

import { removeChat, renameChat, storedChats, storeChat, titleOf } from "./chat_store.js";
import { element } from "./format.js";
import { iconButton } from "./icons.js";
import { readText, writeText } from "./storage.js";

const KEY = "corella.side";

const MAX_TITLE = 100;
const DAY_MS = 86_400_000;

const at = (id) => document.getElementById(id);

/** Screens on which the side bar is beside the chat. */
const WIDE = matchMedia("(min-width: 900px)");

export class SideBar {
  /** `currentId` returns the id of the shown chat, `open` shows another one. `removed` is called after a removal. */
  constructor({ currentId, open, removed }) {
    Object.assign(this, { currentId, open, removed });
    /** The chat that was deleted last, until another one is opened. */
    this.deleted = null;
    at("side-toggle").addEventListener("click", () => this.#show(at("side").hidden));
    at("side-shade").addEventListener("click", () => this.close());
    WIDE.addEventListener("change", () => this.#begin());
    // Another tab changed the list.
    addEventListener("storage", () => this.draw());
    this.#begin();
  }

  #begin() {
    this.#place(WIDE.matches && readText("browser", KEY) !== "hidden");
  }

  #show(isShown) {
    if (WIDE.matches) {
      writeText("browser", KEY, isShown ? "shown" : "hidden");
    }
    this.#place(isShown);
    if (isShown && !WIDE.matches) {
      at("clear").focus();
    }
  }

  #place(isShown) {
    const isOver = isShown && !WIDE.matches;
    at("side").hidden = !isShown;
    at("side-shade").hidden = !isOver;
    // Controls behind the list cannot be used.
    for (const id of ["chat", "engine", "strip"]) {
      at(id).inert = isOver;
    }
    at("side-toggle").setAttribute("aria-expanded", String(isShown));
    this.draw();
  }

  /** Closes the list if it lies over the chat, and returns whether it did. */
  close() {
    if (at("side-shade").hidden) {
      return false;
    }
    this.#place(false);
    at("side-toggle").focus();
    return true;
  }

  draw() {
    // The list is not redrawn while a name is being written, so that the name is not lost.
    if (at("side").hidden || at("chat-groups").querySelector("input")) {
      return;
    }
    const chats = storedChats();
    if (this.deleted) {
      chats.push(this.deleted);
      chats.sort((one, other) => other.saved - one.saved);
    }
    at("no-chats").hidden = chats.length > 0;
    const groups = grouped(chats);
    at("chat-groups").replaceChildren(
      ...[...groups].flatMap(([age, members]) => [
        element("h2", { textContent: age }),
        element("ul", {}, ...members.map((chat) => this.#row(chat))),
      ]),
    );
  }

  #row(chat) {
    const title = titleOf(chat);
    if (chat === this.deleted) {
      const undo = element("button", { type: "button", textContent: "Undo" });
      undo.addEventListener("click", () => {
        this.deleted = null;
        storeChat(chat);
        this.draw();
      });
      return element("li", { className: "deleted" }, element("span", { className: "quiet", textContent: "Deleted." }), undo);
    }
    const open = element("button", { type: "button", className: "chat-title" });
    const when = new Date(chat.saved).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    open.append(element("span", { textContent: title }));
    open.title = `${title}\n${when}`;
    const row = element("li", {}, open);
    if (chat.id === this.currentId()) {
      open.setAttribute("aria-current", "true");
    }
    open.addEventListener("click", () => {
      this.deleted = null;
      this.close();
      this.open(chat);
    });
    row.append(
      iconButton("edit", `Rename “${title}”`, () => this.#rename(chat, row)),
      iconButton("remove", `Delete “${title}”`, () => this.#remove(chat)),
    );
    return row;
  }

  #rename(chat, row) {
    const input = element("input", { value: titleOf(chat), maxLength: MAX_TITLE });
    input.setAttribute("aria-label", "Name of the chat");
    let isOver = false;
    const end = (isKept) => {
      // The field also loses the focus when it is removed.
      if (isOver) {
        return;
      }
      isOver = true;
      if (isKept && input.value.trim() !== "") {
        renameChat(chat.id, input.value.trim());
      }
      row.remove();
      this.draw();
      at("chat-groups").querySelector("[aria-current]")?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "Escape") {
        // Escape ends the renaming, and must not stop an answer that is still arriving.
        event.stopPropagation();
        end(event.key === "Enter");
      }
    });
    input.addEventListener("blur", () => end(true));
    row.replaceChildren(input);
    input.select();
  }

  #remove(chat) {
    this.deleted = chat;
    removeChat(chat.id);
    this.removed(chat);
    this.draw();
    at("chat-groups").querySelector(".deleted button")?.focus();
  }
}

/** Returns the heading for the age of a chat. */
function ageOf({ saved }) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  const limits = [["Today", midnight], ["Yesterday", midnight - DAY_MS], ["Last 7 days", midnight - 7 * DAY_MS]];
  const [age] = limits.find(([, from]) => saved >= from) ?? ["Older"];
  return age;
}

/** Groups chats by their age, in the given order. */
function grouped(chats) {
  const groups = new Map();
  for (const chat of chats) {
    groups.set(ageOf(chat), [...(groups.get(ageOf(chat)) ?? []), chat]);
  }
  return groups;
}
