// One message as it is drawn, while it grows and when it is complete.

import { fileList } from "./attachments.js";
import { element } from "./format.js";
import { iconButton } from "./icons.js";
import { renderMarkdown } from "./markdown.js";
import { TokenList } from "./token_list.js";

const ICONS = { Copy: "copy", Edit: "edit", "Try again": "retry" };

export class MessageView {
  /** `actions` are buttons for the footer, by their names. */
  constructor(message, showsTokens, actions = {}) {
    this.message = message;
    this.actions = actions;
    this.isAnswer = message.role === "assistant";
    this.element = element("li", { className: `message ${message.role}` });
    this.element.append(element("h3", { textContent: this.isAnswer ? (message.model ?? "Model") : "You" }));
    this.body = element("div", { className: "body" });
    this.note = element("span");
    this.footer = element("footer");
    if (message.files) {
      this.element.append(fileList(message.files));
    }
    this.element.append(this.body, this.footer);
    this.body.hidden = !this.isAnswer && message.content === "";
    this.setShowsTokens(showsTokens);
    this.finish();
  }

  /** Draws the text, or its tokens where they are known. */
  setShowsTokens(showsTokens) {
    const { message } = this;
    this.showsTokens = showsTokens;
    this.list = null;
    this.body.replaceChildren();
    this.body.classList.remove("markdown");
    if (showsTokens && this.isAnswer && message.tokens) {
      this.list = new TokenList();
      this.body.replaceChildren(this.list.element);
    } else if (this.isAnswer) {
      this.body.classList.add("markdown");
    } else {
      this.body.textContent = message.content;
    }
    this.redraw();
    this.#showAbsence();
  }

  begin() {
    this.element.classList.add("running");
    this.footer.replaceChildren(this.note);
  }

  /** Draws the text that has arrived since the last call. */
  redraw() {
    const { message } = this;
    if (this.list) {
      this.list.push(message.tokens.slice(this.list.tokens.length));
    } else if (this.isAnswer) {
      renderMarkdown(this.body, message.content);
    }
    this.#showReasoning();
    this.note.textContent = message.note ?? "";
  }

  finish() {
    const { message } = this;
    this.element.classList.remove("running");
    this.redraw();
    this.element.querySelector(".error")?.remove();
    if (message.error) {
      const error = element("p", { className: "error", textContent: message.error });
      error.setAttribute("role", "alert");
      this.footer.before(error);
    }
    const buttons = Object.entries(this.actions).map(([name, action]) => iconButton(ICONS[name], name, action));
    const actions = element("div", { className: "actions" }, ...buttons);
    this.footer.replaceChildren(...(message.note ? [this.note] : []), actions);
    this.#showAbsence();
  }

  /** Disables the buttons that change the conversation while an answer arrives. */
  setBusy(isBusy) {
    for (const button of this.footer.querySelectorAll("button")) {
      button.disabled = isBusy && button.title === "Edit";
    }
  }

  #showReasoning() {
    const { reasoning } = this.message;
    // The list of tokens includes the reasoning.
    if (!reasoning || this.list) {
      this.element.querySelector(".reasoning")?.remove();
      return;
    }
    let box = this.element.querySelector(".reasoning");
    if (!box) {
      box = element("details", { className: "reasoning", open: this.message.content === "" });
      box.append(element("summary", { textContent: "Reasoning" }), element("div"));
      this.body.before(box);
    }
    box.lastChild.textContent = reasoning;
  }

  /** Says that an answer has no probabilities, if they should be shown. */
  #showAbsence() {
    this.element.querySelector(".no-probabilities")?.remove();
    const isMissing = this.showsTokens && this.isAnswer && !this.list && this.message.content !== "";
    if (isMissing && !this.element.classList.contains("running")) {
      this.footer.append(element("span", { className: "no-probabilities", textContent: "no probabilities recorded" }));
    }
  }
}
