// Explains why an answer failed, in words for people who do not know the API.

import { CallError } from "./api.js";
import { count } from "./format.js";

/** `contextLength` is the length of the model's context in tokens, or `null` while it is unknown. */
export function explain(error, contextLength) {
  if (!(error instanceof CallError)) {
    return "The connection broke before the answer was complete.";
  }
  if (error.status === 401) {
    return "Enter the API key above, and then try again.";
  }
  if (error.code === "context_length_exceeded" && error.param === "messages") {
    const length = contextLength ? ` of ${count(contextLength)} tokens` : "";
    const advice = "Shorten your message, or begin a new chat.";
    return `The conversation is longer than the model's context${length}. ${advice} The server says: ${error.message}`;
  }
  return error.message;
}
