// Reads the events of a chat completion into a message.

import { CallError, events } from "./api.js";
import { tokensOf } from "./token_list.js";

/** `onGrowth` is called at most once for each frame, after the answer has grown. */
export async function readAnswer(response, answer, progress, onGrowth) {
  const decoder = new TextDecoder();
  let isDue = false;
  const draw = () => {
    isDue = false;
    onGrowth();
  };
  for await (const { name, data } of events(response)) {
    if (name === "error") {
      throw new CallError(data.error?.message ?? "The answer failed.", 0);
    }
    if (data === "[DONE]") {
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
      progress.handleTokens(tokens.length);
    }
    progress.finishReason = choice.finish_reason ?? progress.finishReason;
    answer.content += text;
    answer.reasoning += reasoning;
    answer.tokens?.push(...tokens);
    answer.note = progress.note();
    if (!isDue) {
      isDue = true;
      requestAnimationFrame(draw);
    }
  }
  throw new Error("the stream ended early");
}
