// The progress of an answer: its tokens and times, while it arrives and when it has ended.

import { count, duration, rate } from "./format.js";

/** Tokens within a shorter time came in one piece, so their speed is given with the time of the prompt. */
const MIN_RATE_MS = 50;

export class Progress {
  constructor() {
    this.begun = performance.now();
    this.first = null;
    this.last = null;
    this.num = 0;
    this.usage = null;
    this.finishReason = null;
  }

  /** An event seldom has more than one token, unless it lists them. */
  handleTokens(num) {
    this.first ??= performance.now();
    this.last = performance.now();
    this.num += Math.max(num, 1);
  }

  /** A count that the server has not confirmed is marked. */
  note() {
    if (this.first === null) {
      const ends = { stopped: "stopped before the first token", stop: "the model had nothing to say" };
      return ends[this.finishReason] ?? "";
    }
    const numTokens = this.usage?.completion_tokens ?? this.num;
    const sign = this.usage ? "" : "≈ ";
    const parts = [`${sign}${count(numTokens)} ${numTokens === 1 ? "token" : "tokens"}`];
    const elapsed = this.last - this.first;
    if (numTokens > 1 && elapsed >= MIN_RATE_MS) {
      parts.push(`${sign}${rate((1000 * (numTokens - 1)) / elapsed)} tokens/s`);
    } else {
      parts.push(`${sign}${rate((1000 * numTokens) / (this.last - this.begun))} tokens/s with the prompt`);
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
