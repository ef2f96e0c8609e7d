// The chat: sends the conversation, shows the answer as it comes, and stops it.

import { readAnswer } from "./answer_reader.js";
import { call } from "./api.js";
import { ChatList } from "./chat_list.js";
import { canCopy, copy } from "./clipboard.js";
import { Conversation } from "./conversation.js";
import { explain } from "./failure.js";
import { element } from "./format.js";
import { MessageView } from "./message_view.js";
import { Progress } from "./progress.js";
import { Settings } from "./settings.js";
import { dismissCard } from "./token_list.js";

/** The built-in model can answer these. */
const EXAMPLES = [
  "Tell me a story about a cat who found a key.",
  "Make a list of five fruits.",
  "What is 12 + 30?",
];

const MAX_ALTERNATIVES = 5;

const at = (id) => document.getElementById(id);

/** Where both views fit. On smaller screens a focused field brings up a keyboard that hides half the page. */
const isWide = () => matchMedia("(min-width: 960px)").matches;

export class Chat {
  /** `onUnauthorized` is called when the server wants a key, or another one. */
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.conversation = new Conversation();
    this.settings = new Settings(() => this.#showTokens());
    this.views = [];
    /** The answer that comes: its `control`, `answer`, `progress`, and the `old` one that it is to replace. */
    this.attempt = null;
    /** The text that a failed attempt gave back to the message field. */
    this.returned = null;
    this.maxAlternatives = MAX_ALTERNATIVES;
    this.contextLength = null;
    this.list = new ChatList({
      currentId: () => this.conversation.chat.id,
      open: (chat) => this.#replace(() => this.conversation.open(chat)),
      removed: ({ id }) => id === this.conversation.chat.id && this.#replace(() => this.conversation.clear()),
    });
    this.#listen();
    this.#draw();
    if (isWide() && document.activeElement === document.body) {
      at("message").focus();
    }
  }

  #listen() {
    const message = at("message");
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(message.value);
    });
    message.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send(message.value);
      }
    });
    at("stop").addEventListener("click", () => this.#stop());
    addEventListener("keydown", (event) => {
      // Escape has other uses: it closes lists, ends the choice of a character, and puts the card of a token away.
      const isTaken = event.isComposing || event.target.tagName === "SELECT";
      if (event.key === "Escape" && !isTaken && !dismissCard()) {
        this.#stop();
      }
    });
    at("clear").addEventListener("click", () => {
      this.#replace(() => this.conversation.clear());
      message.focus();
    });
    at("undo-clear").addEventListener("click", () => {
      this.conversation.undoClear();
      this.#draw();
      message.focus();
    });
    addEventListener("pagehide", () => this.#leave());
    at("examples").append(
      ...EXAMPLES.map((text) => {
        const button = element("button", { type: "button", textContent: text });
        button.addEventListener("click", () => this.#send(text));
        return element("li", {}, button);
      }),
    );
  }

  /** Shows another conversation. The tokens of an answer that still comes are kept in the old one. */
  #replace(change) {
    this.#leave();
    this.#stop();
    change();
    this.#draw();
  }

  #draw() {
    const { messages, cleared } = this.conversation;
    this.views = messages.map((message) => new MessageView(message, this.settings.showsTokens, this.#actions(message)));
    at("messages").replaceChildren(...this.views.map((view) => view.element));
    at("empty").hidden = messages.length > 0;
    at("undo-clear").hidden = cleared === null;
    at("token-scale").hidden = !this.settings.showsTokens;
    this.#scrollToEnd();
  }

  #showTokens() {
    this.views.forEach((view) => view.setShowsTokens(this.settings.showsTokens));
    at("token-scale").hidden = !this.settings.showsTokens;
  }

  #actions(message) {
    const actions = {};
    if (message.role === "user") {
      actions.Edit = () => this.#edit(message);
    } else if (message.content !== "" && canCopy()) {
      actions.Copy = (button) => copy(message.content, button);
    }
    if (message === this.conversation.messages.at(-1)) {
      actions["Try again"] = () => this.#retry();
    }
    return actions;
  }

  #send(text) {
    if (this.attempt || text.trim() === "") {
      return;
    }
    const { messages } = this.conversation;
    if (this.returned !== null) {
      // What failed was given back, and has now been said in its final words.
      messages.splice(-2);
    }
    // An example does not take the place of a draft.
    if (at("message").value === text) {
      at("message").value = "";
    }
    this.conversation.say(text);
    this.#answer(null);
  }

  #retry() {
    if (this.attempt) {
      return;
    }
    const { messages } = this.conversation;
    if (at("message").value === this.returned) {
      at("message").value = "";
    }
    const old = messages.at(-1).role === "assistant" ? messages.pop() : null;
    this.#answer(old);
    (isWide() ? at("message") : at("stop")).focus();
  }

  #edit(message) {
    if (this.attempt) {
      return;
    }
    this.returned = null;
    this.conversation.cut(message);
    this.#draw();
    at("message").value = message.content;
    at("message").focus();
  }

  #stop() {
    this.attempt?.control.abort();
  }

  async #answer(old) {
    this.returned = null;
    const { conversation, settings } = this;
    const answer = { role: "assistant", content: "", reasoning: "", ...(settings.showsTokens && { tokens: [] }) };
    const body = this.#request();
    conversation.messages.push(answer);
    this.#draw();
    const view = this.views.at(-1);
    view.begin();
    const attempt = { control: new AbortController(), answer, old, progress: new Progress() };
    this.#setAttempt(attempt);
    try {
      const response = await call("/v1/chat/completions", { body, signal: attempt.control.signal });
      await readAnswer(response, answer, attempt.progress, () => this.#grow(view));
    } catch (error) {
      if (error.name === "AbortError") {
        attempt.progress.finishReason = "stopped";
      } else {
        answer.error = explain(error, this.contextLength);
        this.#lead(error);
      }
    }
    answer.note = attempt.progress.note();
    this.#setAttempt(null);
    // The conversation may have been cleared meanwhile.
    if (conversation.messages.at(-1) === answer) {
      this.#end(attempt, view);
    }
  }

  #end(attempt, view) {
    const { answer, old } = attempt;
    const { messages } = this.conversation;
    const wasAtEnd = isAtEnd();
    const hasFailed = isEmpty(answer) && (answer.error || attempt.progress.finishReason === "stopped");
    if (hasFailed && old && !isEmpty(old)) {
      messages[messages.length - 1] = { ...old, error: answer.error };
      this.#draw();
    } else {
      view.actions = this.#actions(answer);
      view.finish();
      if (hasFailed) {
        this.#giveBack(messages.at(-2).content);
      }
    }
    this.conversation.save();
    if (wasAtEnd || answer.error) {
      this.#scrollToEnd();
    }
    at("announcer").textContent = answer.error || isEmpty(answer) ? "" : `Answer: ${answer.content}`;
  }

  /** A message that got no answer is not sent again by itself, so its text must not be lost. */
  #giveBack(text) {
    if (at("message").value === "") {
      at("message").value = text;
      this.returned = text;
    }
  }

  /** Keeps the part of the answer that has come: the page may never be seen again. */
  #leave() {
    const { messages } = this.conversation;
    if (!this.attempt || messages.at(-1) !== this.attempt.answer) {
      return;
    }
    const { answer, old, progress } = this.attempt;
    progress.finishReason = "stopped";
    answer.note = progress.note();
    const last = isEmpty(answer) && old ? old : answer;
    this.conversation.save(last);
  }

  #request() {
    const { sampling, system, showsTokens } = this.settings;
    const body = {
      ...sampling.fields(),
      messages: this.conversation.forModel(system),
      stream: true,
      stream_options: { include_usage: true },
    };
    const model = at("model").value;
    if (!at("model").disabled && model !== "") {
      body.model = model;
    }
    if (showsTokens) {
      body.logprobs = true;
      body.top_logprobs = this.maxAlternatives;
    }
    return body;
  }

  #grow(view) {
    const follows = isAtEnd();
    view.redraw();
    if (follows) {
      this.#scrollToEnd();
    }
  }

  /** Leads to what has to be changed for a request that was refused. */
  #lead(error) {
    if (error.status === 401) {
      this.onUnauthorized();
    } else {
      this.settings.mark(error);
    }
  }

  #setAttempt(attempt) {
    const hadFocus = document.activeElement === at("stop") || document.activeElement === at("send");
    this.attempt = attempt;
    at("send").hidden = attempt !== null;
    at("stop").hidden = attempt === null;
    at("announcer").textContent = attempt ? "The model answers." : "";
    this.views.forEach((view) => view.setBusy(attempt !== null));
    if (hadFocus) {
      (attempt ? at("stop") : isWide() ? at("message") : at("send")).focus();
    }
  }

  #scrollToEnd() {
    at("scroll").scrollTop = at("scroll").scrollHeight;
  }
}

const isEmpty = ({ content, reasoning }) => content === "" && !reasoning;

/** Whether the reader sees the end of the conversation, and wants to follow it. */
function isAtEnd() {
  const scroll = at("scroll");
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;
}
