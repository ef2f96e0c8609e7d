// The tokens of an answer, each with how likely it was and what else was likely.
//
// The tab key stops once at the list, and arrow keys move within it. Pointer, touch and keyboard show the same card.

import { element, percent } from "./format.js";

const card = document.getElementById("token-card");
let shown = null;

/** Tokens with their alternatives, as they come in the `logprobs` of chunks. */
export function tokensOf(logprobs, decoder) {
  return (logprobs?.content ?? []).map(({ token, bytes, logprob, top_logprobs }) => {
    // A character may have several tokens. It is shown with the last token.
    const text = bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
    return [text, logprob, (top_logprobs ?? []).map((other) => [other.token, other.logprob])];
  });
}

export class TokenList {
  constructor() {
    this.element = element("div", { className: "tokens", tabIndex: 0 });
    this.element.setAttribute("role", "listbox");
    this.element.setAttribute("aria-label", "Answer, token by token");
    this.tokens = [];
    this.selected = -1;
    const list = this.element;
    list.addEventListener("keydown", (event) => this.#handleKey(event));
    list.addEventListener("focus", () => this.#select(Math.max(this.selected, 0), true));
    list.addEventListener("blur", () => this.#select(-1));
    list.addEventListener("pointerover", (event) => {
      const at = this.#indexOf(event.target);
      if (at !== -1) {
        this.#select(at);
      }
    });
    list.addEventListener("pointerleave", () => {
      if (document.activeElement !== list) {
        this.#select(-1);
      }
    });
  }

  /** Unmarks the token of the card, and hides the card. */
  dismiss() {
    this.#select(-1);
  }

  push(tokens) {
    for (const token of tokens) {
      const option = element("span", { id: `${this.#name()}-${this.tokens.length}`, textContent: token[0] });
      option.setAttribute("role", "option");
      option.setAttribute("aria-selected", "false");
      if (token[0].trim() === "") {
        option.setAttribute("aria-label", visible(token[0]));
      }
      option.className = `p${level(Math.exp(token[1]))}`;
      this.tokens.push(token);
      this.element.append(option);
    }
  }

  #name() {
    this.name ??= `tokens${Math.random().toString(36).slice(2)}`;
    return this.name;
  }

  #indexOf(target) {
    return target.parentNode === this.element ? [...this.element.children].indexOf(target) : -1;
  }

  #handleKey(event) {
    const last = this.tokens.length - 1;
    const moves = {
      ArrowRight: this.selected + 1,
      ArrowLeft: this.selected - 1,
      ArrowDown: this.selected + 10,
      ArrowUp: this.selected - 10,
      Home: 0,
      End: last,
    };
    if (event.key in moves && last >= 0) {
      event.preventDefault();
      this.#select(Math.min(Math.max(moves[event.key], 0), last), true);
    }
  }

  #select(at, follows = false) {
    this.element.children[this.selected]?.setAttribute("aria-selected", "false");
    this.selected = at;
    const option = this.element.children[at];
    if (!option) {
      this.element.removeAttribute("aria-activedescendant");
      hide(this);
      return;
    }
    option.setAttribute("aria-selected", "true");
    this.element.setAttribute("aria-activedescendant", option.id);
    option.setAttribute("aria-label", described(this.tokens[at]));
    if (follows) {
      option.scrollIntoView({ block: "nearest" });
    }
    show(this, this.tokens[at], option);
  }
}

/** Returns the level of a probability: 4 for likely tokens, 0 for the least likely ones. */
function level(probability) {
  return probability >= 0.9 ? 4 : probability >= 0.5 ? 3 : probability >= 0.2 ? 2 : probability >= 0.05 ? 1 : 0;
}

function described([text, logprob, others]) {
  const rest = others.filter(([other]) => other !== text).map(([other, p]) => `${visible(other)} ${percent(Math.exp(p))}`);
  const instead = rest.length === 0 ? "" : `; instead: ${rest.join(", ")}`;
  return `${visible(text)} ${percent(Math.exp(logprob))}${instead}`;
}

/** White space as signs, so that it can be seen. */
function visible(text) {
  if (text === "") {
    return "part of a character";
  }
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

function show(owner, [text, logprob, others], option) {
  shown = { owner, option };
  const drawn = [text, logprob];
  const isListed = others.some(([other]) => other === text);
  const rows = isListed ? others : [drawn, ...others];
  const bars = rows.map(([other, p]) => {
    const fill = element("i");
    fill.style.width = `${100 * Math.exp(p)}%`;
    return element(
      "li",
      { className: other === text ? "drawn" : "" },
      element("code", { textContent: visible(other) }),
      element("span", { className: "meter" }, fill),
      element("span", { className: "share", textContent: percent(Math.exp(p)) }),
    );
  });
  const head = element("p", {}, element("code", { textContent: visible(text) }), ` was drawn with ${percent(Math.exp(logprob))}`);
  card.replaceChildren(head, element("ul", {}, ...bars));
  card.hidden = false;
  place();
}

/** Puts the card below its token, or above it where there is no room. */
function place() {
  const { option } = shown;
  const at = option.getClientRects()[0] ?? option.getBoundingClientRect();
  const size = card.getBoundingClientRect();
  const below = at.bottom + 6;
  const top = below + size.height > innerHeight ? Math.max(at.top - size.height - 6, 4) : below;
  card.style.left = `${Math.min(Math.max(at.left, 8), Math.max(innerWidth - size.width - 8, 8))}px`;
  card.style.top = `${top}px`;
}

/** Hides the card. Returns false if there was none. */
export function dismissCard() {
  const owner = shown?.owner;
  owner?.dismiss();
  return owner !== undefined;
}

function hide(owner) {
  if (shown?.owner === owner) {
    shown = null;
    card.hidden = true;
  }
}

addEventListener(
  "scroll",
  () => {
    if (shown) {
      place();
    }
  },
  true,
);
