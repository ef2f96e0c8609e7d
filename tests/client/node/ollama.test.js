// Ollama's own client for Node: streams, tools and errors as it reads them.

import assert from "node:assert/strict";
import { before, test } from "node:test";

import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.CORELLA_URL });
// This server's model says what the seed of a request chooses: a call, two calls, or an answer.
const dictated = new Ollama({ host: process.env.CORELLA_DICTATED_URL });
const [ONE_CALL] = [0];

const prompt = "Tell me a story about a fox and a lantern.";
const messages = [{ role: "user", content: prompt }];
const options = { temperature: 0, num_predict: 16 };

let model, dictatedModel;
before(async () => {
  model = (await client.list()).models[0].model;
  dictatedModel = (await dictated.list()).models[0].model;
});

test("a stream adds up to the whole", async () => {
  const whole = await client.chat({ model, messages, options });
  let text = "";
  let last;
  for await (const part of await client.chat({ model, messages, options, stream: true })) {
    text += part.message.content;
    last = part;
  }
  assert.equal(text, whole.message.content);
  assert.equal(last.done_reason, whole.done_reason);
  assert.equal(last.eval_count, whole.eval_count);
  const generated = await client.generate({ model, prompt, options });
  assert.equal(generated.response, whole.message.content);
});

test("models are shown and listed", async () => {
  const { capabilities } = await client.show({ model });
  assert.ok(capabilities.includes("completion"));
  assert.equal((await client.ps()).models[0].model, model);
});

test("a tool is called", async () => {
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const tools = [{ type: "function", function: { name: "get_weather", description: "The weather", parameters } }];
  const asked = { model: dictatedModel, messages, tools, options: { seed: ONE_CALL, num_predict: 500 } };
  const { message } = await dictated.chat(asked);
  assert.equal(message.thinking, "Hm, été.");
  const [call] = message.tool_calls;
  assert.deepEqual(call.function.arguments, { city: "Orléans" });
  const answered = [...messages, message, { role: "tool", tool_name: "get_weather", content: "Rain" }];
  assert.ok((await dictated.chat({ ...asked, messages: answered })).done);
});

test("errors are texts", async () => {
  await assert.rejects(client.chat({ model: "other", messages }), { status_code: 404 });
  const refused = client.generate({ model, prompt, stream: true, options: { mirostat: 2 } });
  await assert.rejects(refused, /options\.mirostat/);
});
