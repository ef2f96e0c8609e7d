// One message as it is drawn, while it grows and when it is complete.

import { element } from "./format.js";
import { TokenList } from "./token_list.js";

const SCALE = [["p4", "≥ 90 %"], ["p3", "≥ 50 %"], ["p2", "≥ 20 %"], ["p1", "≥ 5 %"], ["p0", "less"]];

export class MessageView {
  /** `actions` are buttons for the footer, by their names. */
  constructor(message, showsTokens, actions = {}) {
    this.message = message;
    this.actions = actions;
    const isAnswer = message.role === "assistant";
    this.element = element("li", { className: `message ${message.role}` });
    this.element.append(element("h3", { textContent: isAnswer ? "Model" : "You" }));
    this.body = element("div", { className: "body" });
    this.footer = element("footer");
    this.element.append(this.body, this.footer);
    this.setShowsTokens(showsTokens);
    this.finish();
  }

  /** Draws the text, or its tokens where they are known. */
  setShowsTokens(showsTokens) {
    const { message } = this;
    this.list = null;
    if (showsTokens && message.role === "assistant" && message.tokens) {
      this.list = new TokenList();
      this.list.push(message.tokens);
      this.body.replaceChildren(this.list.element);
    } else {
      this.body.replaceChildren(message.content);
    }
    this.#showReasoning();
    this.#showScale();
  }

  begin() {
    this.element.classList.add("running");
    this.footer.replaceChildren();
  }

  /** Adds what has come. The message has it already. */
  grow(text, reasoning, tokens) {
    if (this.list) {
      this.list.push(tokens);
    } else if (text !== "") {
      this.body.append(text);
    }
    if (reasoning !== "") {
      this.#showReasoning();
    }
  }

  finish() {
    const { message } = this;
    this.element.classList.remove("running");
    // One text node again, after many small ones.
    this.body.normalize();
    this.element.querySelector(".error")?.remove();
    if (message.error) {
      const error = element("p", { className: "error", textContent: message.error });
      error.setAttribute("role", "alert");
      this.footer.before(error);
    }
    const buttons = Object.entries(this.actions).map(([name, action]) => {
      const button = element("button", { type: "button", textContent: name });
      button.addEventListener("click", () => action(button));
      return button;
    });
    const note = message.note ? [element("span", { textContent: message.note })] : [];
    this.footer.replaceChildren(...note, ...buttons);
    this.#showScale();
  }

  #showReasoning() {
    const { reasoning } = this.message;
    // Among the tokens it is to be seen already.
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

  #showScale() {
    this.element.querySelector(".token-scale")?.remove();
    if (this.list && !this.element.classList.contains("running")) {
      const steps = SCALE.map(([className, text]) => element("span", { className, textContent: text }));
      this.footer.append(element("span", { className: "token-scale tokens" }, ...steps));
    }
  }
}
