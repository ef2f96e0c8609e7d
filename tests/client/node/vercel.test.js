// Vercel's AI SDK, by its client for servers that speak OpenAI's API.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = (url) => createOpenAICompatible({
  name: "corella", baseURL: `${url}/v1`, apiKey: "unused", includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(process.env.CORELLA_URL)(process.env.CORELLA_MODEL);
const dictated = provider(process.env.CORELLA_DICTATED_URL)(process.env.CORELLA_DICTATED_MODEL);
const [ONE_CALL] = [0];

const greedy = { model, prompt: "Tell me a story about a fox and a lantern.", temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

test("a stream says what the whole says", async () => {
  const whole = await generateText(greedy);
  assert.ok(whole.text.length > 0);
  const stream = streamText(greedy);
  let text = "";
  for await (const delta of stream.textStream) text += delta;
  assert.equal(text, whole.text);
  assert.equal(await stream.finishReason, whole.finishReason);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
});

test("an answer is an object of a Zod schema", async () => {
  const schema = z.object({ name: z.string().max(12), legs: z.number().int().min(2).max(4) });
  const { output } = await generateText({ ...greedy, maxOutputTokens: 200, output: Output.object({ schema }) });
  assert.deepEqual(schema.parse(output), output);
});

test("a tool is called, with reasoning and text before the call", async () => {
  const cities = [];
  const weather = tool({
    description: "The weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: ({ city }) => (cities.push(city), "sunny"),
  });
  const asked = { model: dictated, prompt: "What is the weather?", seed: ONE_CALL, maxRetries: 0 };
  const tools = { tools: { get_weather: weather }, stopWhen: stepCountIs(1) };
  const whole = await generateText({ ...asked, ...tools });
  const stream = streamText({ ...asked, ...tools });
  await stream.consumeStream();
  for (const result of [whole, stream]) {
    assert.equal(await result.finishReason, "tool-calls");
    assert.equal(await result.text, "I look.");
    assert.equal(await result.reasoningText, "Hm, été.");
    assert.deepEqual((await result.toolCalls).map((call) => call.input), [{ city: "Orléans" }]);
  }
  assert.deepEqual(cities, ["Orléans", "Orléans"]);
});
