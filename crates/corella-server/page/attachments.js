// The text files that go with the next message. They are read in the browser, and sent as part of its text.

import { bytes, element } from "./format.js";
import { icon, iconButton } from "./icons.js";

/** Limits the files of one message together, so that chats fit into the browser's storage. */
const MAX_BYTES = 256 * 1024;
const MAX_FILES = 10;

const at = (id) => document.getElementById(id);

export class Attachments {
  constructor() {
    /** `{ name, text }` each. */
    this.files = [];
    at("attach").addEventListener("click", () => at("file").click());
    at("file").addEventListener("change", async ({ target }) => {
      const chosen = [...target.files];
      // The same file can be chosen again.
      target.value = "";
      await this.add(chosen);
      at("message").focus();
    });
    at("message").addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      // The clipboard has a text with a picture of it after a copy from a table or a page. The text is pasted then.
      if (files.length > 0 && !types.includes("text/plain")) {
        event.preventDefault();
        this.add([...files]);
      }
    });
    this.#listenForDrops(at("chat"));
  }

  #listenForDrops(pane) {
    const hasFiles = (event) => event.dataTransfer.types.includes("Files");
    for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
      pane.addEventListener(name, (event) => {
        if (!hasFiles(event)) {
          return;
        }
        event.preventDefault();
        const isOver = name !== "drop" && (name !== "dragleave" || pane.contains(event.relatedTarget));
        pane.classList.toggle("dropping", isOver);
        if (name === "drop") {
          this.add([...event.dataTransfer.files]);
        }
      });
    }
  }

  /** Adds the files that are text and fit, and shows why the other files are left out. */
  async add(files) {
    at("file-error").textContent = "";
    const refusals = [];
    for (const file of files) {
      const refusal = await this.#take(file);
      if (refusal) {
        refusals.push(refusal);
      }
    }
    this.#draw();
    at("file-error").textContent = refusals.slice(0, 3).join(" ");
  }

  async #take(file) {
    if (this.files.length === MAX_FILES) {
      return `A message has at most ${MAX_FILES} files.`;
    }
    if (file.size > MAX_BYTES - this.#numBytes()) {
      return `${file.name} has ${bytes(file.size)}; the files of a message have at most ${bytes(MAX_BYTES)} together.`;
    }
    const text = await file.arrayBuffer().then(decoded, () => null);
    if (text === null) {
      return `${file.name} is not a text file.`;
    }
    this.files.push({ name: file.name, text });
    return null;
  }

  #numBytes() {
    // The browser counts the bytes of UTF-8.
    return this.files.reduce((total, { text }) => total + new Blob([text]).size, 0);
  }

  /** Shows these files. */
  set(files) {
    this.files = [...files];
    this.#draw();
    at("file-error").textContent = "";
  }

  #draw() {
    at("files").hidden = this.files.length === 0;
    at("files").replaceChildren(
      ...this.files.map((file) => {
        const remove = iconButton("close", `Remove ${file.name}`, () => {
          this.set(this.files.filter((other) => other !== file));
          at("message").focus();
        });
        return element("li", {}, icon("file"), element("span", { className: "file-name", textContent: file.name }), remove);
      }),
    );
  }
}

/** Returns the text of a file, or `null` if the file is not UTF-8. */
function decoded(buffer) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(buffer);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

/** Returns the text for the model: the files of a message, fenced, and then the message's text. */
export function withFiles({ content, files = [] }) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name.replaceAll(/\s+/g, " ")}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, content].filter((part) => part !== "").join("\n\n");
}

/** Returns the list of a sent message's files. Each file can be opened. */
export function fileList(files) {
  const items = files.map(({ name, text }) => {
    const summary = element("summary", {}, icon("file"), element("span", { className: "file-name", textContent: name }));
    const content = element("pre", { textContent: text, tabIndex: 0 });
    content.setAttribute("role", "group");
    content.setAttribute("aria-label", name);
    return element("li", {}, element("details", {}, summary, content));
  });
  return element("ul", { className: "files said" }, ...items);
}
