// The chat: sends the conversation, shows the answer as it comes, and stops it.

import { readAnswer } from "./answer_reader.js";
import { call } from "./api.js";
import { Attachments } from "./attachments.js";
import { copy } from "./clipboard.js";
import { Conversation } from "./conversation.js";
import { explain } from "./failure.js";
import { element } from "./format.js";
import { MessageView } from "./message_view.js";
import { stateOf } from "./models.js";
import { Progress } from "./progress.js";
import { ScrollFollower } from "./scroll_follower.js";
import { Settings } from "./settings.js";
import { SideBar } from "./side_bar.js";
import { dismissCard } from "./token_list.js";

/** The built-in model can answer these. */
const EXAMPLES = [
  "Tell me a story about a cat who found a key.",
  "Make a list of five fruits.",
  "What is 12 + 30?",
];

const MAX_ALTERNATIVES = 5;

const at = (id) => document.getElementById(id);

/** On smaller screens a focused field brings up a keyboard that hides half the page. */
const isWide = () => matchMedia("(min-width: 960px)").matches;

export class Chat {
  /** `onUnauthorized` is called when the server wants a key, or another one. */
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.conversation = new Conversation(() => this.side.draw());
    this.attachments = new Attachments();
    this.follower = new ScrollFollower(at("scroll"), at("messages"), at("to-end"));
    this.settings = new Settings(() => this.#showTokens());
    this.views = [];
    /** The answer that is arriving: its `control`, `answer`, `progress`, and the `old` answer that it replaces. */
    this.attempt = null;
    /** The message whose text a failed attempt gave back to the message field. */
    this.returned = null;
    /** The earlier message that the next message replaces, with all messages after it. */
    this.edited = null;
    this.maxAlternatives = MAX_ALTERNATIVES;
    this.contextLength = null;
    this.side = new SideBar({
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
      if (event.key === "Escape" && !isTaken && !at("settings").open && !dismissCard() && !this.side.close()) {
        this.#endEdit();
        this.#stop();
      }
    });
    for (const button of document.querySelectorAll(".new-chat")) {
      button.addEventListener("click", () => {
        this.side.close();
        this.#replace(() => this.conversation.clear());
        message.focus();
      });
    }
    at("edit-cancel").addEventListener("click", () => {
      this.#endEdit();
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

  /** Shows another conversation. The tokens of an unfinished answer are kept in the old conversation. */
  #replace(change) {
    this.#leave();
    this.#stop();
    this.#endEdit();
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
    this.follower.toEnd();
  }

  #showTokens() {
    this.views.forEach((view) => view.setShowsTokens(this.settings.showsTokens));
    at("token-scale").hidden = !this.settings.showsTokens;
  }

  #actions(message) {
    const actions = {};
    if (message.content !== "") {
      actions.Copy = (button) => copy(message.content, button);
    }
    if (message.role === "user") {
      actions.Edit = () => this.#edit(message);
    }
    if (message === this.conversation.messages.at(-1)) {
      actions["Try again"] = () => this.#retry();
    }
    return actions;
  }

  #send(text) {
    const { attachments, conversation } = this;
    if (this.attempt || (text.trim() === "" && attachments.files.length === 0)) {
      return;
    }
    if (this.edited) {
      conversation.cut(this.edited);
    } else if (this.returned) {
      // The failed message was given back to the field, and is sent now in its final words.
      conversation.messages.splice(-2);
    }
    // An example does not take the place of a draft.
    const isDraft = at("message").value === text;
    const files = isDraft ? attachments.files : [];
    if (isDraft) {
      this.#write("", []);
    }
    this.#endEdit();
    conversation.say(text, files);
    this.#answer(null);
  }

  /** Fills the message field. */
  #write(text, files) {
    at("message").value = text;
    this.attachments.set(files);
  }

  #retry() {
    if (this.attempt) {
      return;
    }
    const { messages } = this.conversation;
    if (this.returned && at("message").value === this.returned.content) {
      this.#write("", []);
    }
    this.#endEdit();
    const old = messages.at(-1).role === "assistant" ? messages.pop() : null;
    this.#answer(old);
    (isWide() ? at("message") : at("stop")).focus();
  }

  #edit(message) {
    if (this.attempt) {
      return;
    }
    this.returned = null;
    this.edited = message;
    at("editing").hidden = false;
    this.#write(message.content, message.files ?? []);
    at("message").focus();
  }

  /** Ends editing without a change of the conversation. */
  #endEdit() {
    if (this.edited) {
      this.edited = null;
      at("editing").hidden = true;
      this.#write("", []);
    }
  }

  #stop() {
    this.attempt?.control.abort();
  }

  async #answer(old) {
    this.returned = null;
    const { conversation, settings } = this;
    const body = this.#request();
    const answer = { role: "assistant", content: "", reasoning: "", ...(settings.showsTokens && { tokens: [] }) };
    if (body.model) {
      answer.model = body.model;
    }
    conversation.messages.push(answer);
    this.#draw();
    const view = this.views.at(-1);
    view.begin();
    const attempt = { control: new AbortController(), answer, old, view, progress: new Progress() };
    this.#setAttempt(attempt);
    try {
      const response = await call("/v1/chat/completions", { body, signal: attempt.control.signal });
      await readAnswer(response, answer, attempt.progress, () => view.redraw());
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

  /** Says that the answer waits for its model. */
  showModel(model) {
    const { answer, progress, view } = this.attempt ?? {};
    if (progress?.first === null && answer.model === model?.id && model?.status) {
      answer.note = model.status.value === "loaded" ? "" : `${model.id}: ${stateOf(model.status)}`;
      view.redraw();
    }
  }

  #end(attempt, view) {
    const { answer, old } = attempt;
    const { messages } = this.conversation;
    const hasFailed = isEmpty(answer) && (answer.error || attempt.progress.finishReason === "stopped");
    if (hasFailed && old && !isEmpty(old)) {
      messages[messages.length - 1] = { ...old, error: answer.error };
      this.#draw();
    } else {
      view.actions = this.#actions(answer);
      view.finish();
      if (hasFailed) {
        this.#giveBack(messages.at(-2));
      }
    }
    this.conversation.save();
    if (answer.error) {
      this.follower.toEnd();
    }
    at("announcer").textContent = answer.error || isEmpty(answer) ? "" : `Answer: ${answer.content}`;
  }

  /** A message that got no answer is not sent again by itself, so its text must not be lost. */
  #giveBack(message) {
    if (at("message").value === "" && this.attachments.files.length === 0) {
      this.#write(message.content, message.files ?? []);
      this.returned = message;
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

  /** Focuses the control that has to be changed after a refused request. */
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
}

const isEmpty = ({ content, reasoning }) => content === "" && !reasoning;
