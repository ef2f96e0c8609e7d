// The chat: sends the conversation, shows the answer as it comes, and stops it.

import { CallError, call, events } from "./api.js";
import { Conversation, readSettings, writeSettings } from "./conversation.js";
import { count, duration, element, rate } from "./format.js";
import { MessageView } from "./message_view.js";
import { Sampling } from "./sampling.js";
import { tokensOf } from "./token_list.js";

const EXAMPLES = [
  "Tell me a story about a fox and a lantern.",
  "Why is the sky blue?",
  "Write a haiku about patience.",
];

const MAX_ALTERNATIVES = 5;

const at = (id) => document.getElementById(id);

export class Chat {
  /** `onUnauthorized` is called when the server wants a key, or another one. */
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.conversation = new Conversation();
    this.views = [];
    this.running = null;
    this.maxAlternatives = MAX_ALTERNATIVES;
    const settings = readSettings();
    this.sampling = new Sampling(at("sampling"), settings.sampling ?? {}, () => this.#saveSettings());
    at("system").value = settings.system ?? "";
    at("probabilities").checked = settings.probabilities ?? false;
    this.#listen();
    this.#summarise();
    this.#draw();
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
    at("stop").addEventListener("click", () => this.running?.abort());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        this.running?.abort();
      }
    });
    at("clear").addEventListener("click", () => {
      this.running?.abort();
      this.conversation.clear();
      this.#draw();
      message.focus();
    });
    at("probabilities").addEventListener("change", ({ target }) => {
      this.#saveSettings();
      for (const view of this.views) {
        view.setShowsTokens(target.checked);
      }
    });
    at("system").addEventListener("input", () => this.#saveSettings());
    at("reset-sampling").addEventListener("click", () => {
      this.sampling.reset();
      this.#saveSettings();
    });
    at("examples").append(
      ...EXAMPLES.map((text) => {
        const button = element("button", { type: "button", textContent: text });
        button.addEventListener("click", () => this.#send(text));
        return element("li", {}, button);
      }),
    );
  }

  #saveSettings() {
    writeSettings({
      system: at("system").value,
      sampling: this.sampling.values(),
      probabilities: at("probabilities").checked,
    });
    this.#summarise();
  }

  /** What differs from the defaults, for those who have not opened the settings. */
  #summarise() {
    const parts = Object.entries(this.sampling.values()).map(([name, value]) => `${name} ${value}`);
    if (at("system").value.trim() !== "") {
      parts.unshift("system prompt");
    }
    at("settings-summary").textContent = parts.length === 0 ? "" : `· ${parts.join(", ")}`;
  }

  #draw() {
    const { messages } = this.conversation;
    this.views = messages.map((message, index) => this.#view(message, index === messages.length - 1));
    at("messages").replaceChildren(...this.views.map((view) => view.element));
    at("empty").hidden = messages.length > 0;
    at("scroll").scrollTop = at("scroll").scrollHeight;
  }

  #view(message, isLast) {
    const actions = {};
    // Browsers have a clipboard only for pages of this machine and of HTTPS.
    if (message.role === "assistant" && message.content !== "" && navigator.clipboard) {
      actions.Copy = async (button) => {
        await navigator.clipboard.writeText(message.content);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      };
    }
    if (isLast && message.role === "assistant") {
      actions["Try again"] = () => this.#answer(true);
    }
    return new MessageView(message, at("probabilities").checked, actions);
  }

  #send(text) {
    if (this.running || text.trim() === "") {
      return;
    }
    at("message").value = "";
    this.conversation.messages.push({ role: "user", content: text });
    this.#answer(false);
  }

  async #answer(replacesLast) {
    if (this.running) {
      return;
    }
    const { messages } = this.conversation;
    if (replacesLast) {
      messages.pop();
    }
    const showsTokens = at("probabilities").checked;
    const answer = { role: "assistant", content: "", reasoning: "", ...(showsTokens && { tokens: [] }) };
    const body = this.#request(showsTokens);
    messages.push(answer);
    this.#draw();
    const view = this.views.at(-1);
    view.begin();
    this.#setRunning(new AbortController());
    const progress = new Progress();
    try {
      const response = await call("/v1/chat/completions", { body, signal: this.running.signal });
      await this.#read(response, answer, view, progress);
    } catch (error) {
      if (error.name === "AbortError") {
        progress.finishReason = "stopped";
      } else {
        answer.error = error instanceof CallError ? error.message : "The connection broke before the answer was complete.";
        this.#explain(error);
      }
    }
    answer.note = progress.note();
    this.#setRunning(null);
    if (messages.at(-1) !== answer) {
      // The conversation was cleared meanwhile.
      return;
    }
    this.conversation.save();
    const wasAtEnd = isAtEnd();
    view.actions = this.#view(answer, true).actions;
    view.finish();
    if (wasAtEnd || answer.error) {
      at("scroll").scrollTop = at("scroll").scrollHeight;
    }
    at("announcer").textContent = answer.error ? "" : `Answer: ${answer.content}`;
  }

  #request(showsTokens) {
    const body = {
      ...this.sampling.fields(),
      messages: this.conversation.forModel(at("system").value),
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

  async #read(response, answer, view, progress) {
    const decoder = new TextDecoder();
    for await (const { name, data } of events(response)) {
      if (name === "error") {
        throw new CallError(data.error?.message ?? "The answer failed.", 0);
      }
      if (data === "[DONE]") {
        progress.isComplete = true;
        return;
      }
      progress.usage = data.usage ?? progress.usage;
      const [choice] = data.choices;
      if (!choice) {
        continue;
      }
      const text = choice.delta.content ?? "";
      const reasoning = choice.delta.reasoning_content ?? "";
      const tokens = tokensOf(choice.logprobs, decoder);
      if (text !== "" || reasoning !== "" || tokens.length > 0) {
        progress.handleToken();
      }
      progress.finishReason = choice.finish_reason ?? progress.finishReason;
      answer.content += text;
      answer.reasoning += reasoning;
      answer.tokens?.push(...tokens);
      const follows = isAtEnd();
      view.grow(text, reasoning, tokens);
      if (follows) {
        at("scroll").scrollTop = at("scroll").scrollHeight;
      }
    }
    throw new Error("the stream ended early");
  }

  /** Leads to what has to be changed for a request that was refused. */
  #explain(error) {
    if (error.status === 401) {
      this.onUnauthorized();
    } else if (error.param && this.sampling.mark(error.param, error.message)) {
      at("settings").open = true;
    }
  }

  #setRunning(running) {
    const hadFocus = document.activeElement === at("stop") || document.activeElement === at("send");
    this.running = running;
    at("send").hidden = running !== null;
    at("stop").hidden = running === null;
    at("announcer").textContent = running ? "The model answers." : "";
    if (hadFocus) {
      (running ? at("stop") : at("message")).focus();
    }
  }
}

/** How an answer went: its tokens and times. */
class Progress {
  constructor() {
    this.begun = performance.now();
    this.first = null;
    this.usage = null;
    this.finishReason = null;
    this.isComplete = false;
  }

  handleToken() {
    this.first ??= performance.now();
  }

  note() {
    if (this.first === null) {
      return this.finishReason === "stopped" ? "stopped" : "";
    }
    const parts = [];
    const numTokens = this.usage?.completion_tokens;
    if (numTokens) {
      parts.push(`${count(numTokens)} tokens`);
      const seconds = (performance.now() - this.first) / 1000;
      if (numTokens > 1 && seconds > 0) {
        parts.push(`${rate((numTokens - 1) / seconds)} tokens/s`);
      }
    }
    parts.push(`first after ${duration(this.first - this.begun)}`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) {
      parts.push(`${count(cached)} of ${count(this.usage.prompt_tokens)} prompt tokens cached`);
    }
    if (this.finishReason === "length") {
      parts.push("cut at max tokens");
    } else if (this.finishReason === "stopped") {
      parts.push("stopped");
    }
    return parts.join(" · ");
  }
}

/** Whether the reader sees the end of the conversation, and wants to follow it. */
function isAtEnd() {
  const scroll = at("scroll");
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;
}
