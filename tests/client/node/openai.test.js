// OpenAI's own client for Node: what its helpers make of a stream is what the whole answer says.

import assert from "node:assert/strict";
import { before, describe, test } from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const options = { apiKey: "unused", maxRetries: 0, timeout: 120_000 };
const client = new OpenAI({ ...options, baseURL: `${process.env.CORELLA_URL}/v1` });
// This server's model says what the seed of a request chooses: a call, two calls, or an answer.
const dictated = new OpenAI({ ...options, baseURL: `${process.env.CORELLA_DICTATED_URL}/v1` });
const [ONE_CALL, TWO_CALLS, ANSWER] = [0, 1, 2];

const text = "Tell me a story about a fox and a lantern.";
const messages = [{ role: "user", content: text }];
const Weather = z.object({ city: z.string().max(12) });
const weather = () => zodFunction({ name: "get_weather", parameters: Weather });
// Lengths are bounded, since a small model writes without end, and answers must be whole.
const Animal = z.object({
  name: z.string().max(12),
  kind: z.enum(["fox", "owl"]),
  legs: z.number().int().min(2).max(4),
  parents: z.array(z.string().max(4)).max(2),
});

let model, dictatedModel;
before(async () => {
  model = (await client.models.list()).data[0].id;
  dictatedModel = (await dictated.models.list()).data[0].id;
});

describe("chat", () => {
  const greedy = () => ({ model, messages, temperature: 0, max_tokens: 24 });

  test("a stream says what the whole says", async () => {
    const whole = await client.chat.completions.create(greedy());
    assert.ok(whole.choices[0].message.content.length > 0);
    const stream = client.chat.completions.stream({ ...greedy(), stream_options: { include_usage: true } });
    let content = "";
    stream.on("content", (delta) => (content += delta));
    const final = await stream.finalChatCompletion();
    assert.equal(content, whole.choices[0].message.content);
    assert.equal(final.choices[0].message.content, content);
    assert.equal(final.choices[0].finish_reason, whole.choices[0].finish_reason);
    assert.equal((await stream.totalUsage()).total_tokens, whole.usage.total_tokens);
  });

  test("a stream can be left", async () => {
    const stream = await client.chat.completions.create({ ...greedy(), stream: true });
    for await (const _ of stream) break;
    assert.ok(stream.controller.signal.aborted);
  });

  test("errors have the client's own classes and name the field", async () => {
    await assert.rejects(client.chat.completions.create({ ...greedy(), temperature: -1 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
    await assert.rejects(client.chat.completions.create({ ...greedy(), model: "no-such" }), OpenAI.NotFoundError);
  });

  test("an answer is parsed by Zod", async () => {
    const completion = await client.chat.completions.parse({
      model, messages, seed: 1, max_completion_tokens: 300, response_format: zodResponseFormat(Animal, "animal"),
    });
    assert.equal(completion.choices[0].finish_reason, "stop");
    assert.deepEqual(completion.choices[0].message.parsed, Animal.parse(JSON.parse(completion.choices[0].message.content)));
  });
});

describe("tools", () => {
  const ask = (seed, more = []) => ({
    model: dictatedModel, seed, tools: [weather()],
    messages: [{ role: "user", content: "What is the weather?" }, ...more],
  });

  test("a call is made, answered and read", async () => {
    const first = (await dictated.chat.completions.parse(ask(ONE_CALL))).choices[0];
    assert.equal(first.finish_reason, "tool_calls");
    assert.equal(first.message.content, "I look.");
    const [call] = first.message.tool_calls;
    assert.deepEqual(call.function.parsed_arguments, { city: "Orléans" });
    const { parsed, ...message } = first.message;
    const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
    const second = (await dictated.chat.completions.create(ask(ANSWER, [message, result]))).choices[0];
    assert.equal(second.message.content, "It is sunny.");
  });

  test("streamed calls come in order and are the whole's", async () => {
    const stream = dictated.chat.completions.stream(ask(TWO_CALLS));
    const streamed = ["", ""];
    stream.on("tool_calls.function.arguments.delta", ({ index, name, arguments_delta }) => {
      assert.equal(name, "get_weather");
      streamed[index] += arguments_delta;
    });
    const calls = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
    assert.deepEqual(calls.map((call) => call.function.arguments), streamed);
    assert.deepEqual(streamed.map((one) => Weather.parse(JSON.parse(one))), [{ city: "Orléans" }, { city: "Orléans" }]);
    assert.notEqual(calls[0].id, calls[1].id);
  });

  test("the client runs tools itself", async () => {
    const cities = [];
    const read = ({ city }) => (cities.push(city), "sunny");
    const tools = [zodFunction({ name: "get_weather", parameters: Weather, function: read })];
    // The model calls the tool whatever it is told, so the client must end the loop.
    const runner = dictated.chat.completions.runTools({ ...ask(ONE_CALL), tools }, { maxChatCompletions: 2 });
    await runner.done();
    assert.deepEqual(cities, ["Orléans", "Orléans"]);
    const roles = runner.messages.map((message) => message.role);
    assert.deepEqual(roles, ["user", "assistant", "tool", "assistant", "tool"]);
  });
});

describe("responses", () => {
  const greedy = () => ({ model, input: text, temperature: 0, max_output_tokens: 24 });

  test("a stream says what the whole says", async () => {
    const whole = await client.responses.create(greedy());
    assert.ok(whole.output_text.length > 0);
    const stream = client.responses.stream(greedy());
    let content = "";
    stream.on("response.output_text.delta", ({ delta }) => (content += delta));
    const final = await stream.finalResponse();
    assert.equal(content, whole.output_text);
    assert.equal(final.output_text, whole.output_text);
    assert.equal(final.status, whole.status);
    assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
  });

  test("an answer is parsed by Zod", async () => {
    const response = await client.responses.parse({
      model, input: text, max_output_tokens: 300, text: { format: zodTextFormat(Animal, "animal") },
    });
    assert.equal(response.status, "completed");
    assert.deepEqual(response.output_parsed, Animal.parse(JSON.parse(response.output_text)));
  });
});

describe("embeddings", () => {
  const texts = [text, "A fox told a story.", "What does tea cost?"];
  const embed = async (fields) => (await client.embeddings.create({ model, ...fields })).data.map((item) => item.embedding);
  const length = (vector) => Math.hypot(...vector);
  const assertClose = (found, expected) => {
    assert.equal(found.length, expected.length);
    assert.ok(found.every((x, i) => Math.abs(x - expected[i]) <= 1e-6));
  };

  test("numbers, and the base64 that the client asks for by itself, are the same vectors", async () => {
    const answer = await client.embeddings.create({ model, input: texts });
    assert.deepEqual(answer.data.map((item) => item.index), [0, 1, 2]);
    assert.ok(answer.usage.prompt_tokens > texts.length);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens);
    const numbers = await embed({ input: texts, encoding_format: "float" });
    answer.data.forEach(({ embedding }, i) => {
      assertClose(embedding, numbers[i]);
      assert.ok(Math.abs(length(embedding) - 1) < 1e-5);
    });
    const unlike = numbers[0].some((x, i) => Math.abs(x - numbers[2][i]) > 1e-3);
    assert.ok(unlike, "texts that differ have vectors that do");
    assertClose((await embed({ input: texts[1] }))[0], numbers[1]);
  });

  test("base64 that is asked for stays text", async () => {
    const [encoded] = await embed({ input: text, encoding_format: "base64" });
    assert.equal(typeof encoded, "string");
    const bytes = Buffer.from(encoded, "base64");
    const read = Array.from({ length: bytes.length / 4 }, (_, i) => bytes.readFloatLE(4 * i));
    assertClose(read, (await embed({ input: text }))[0]);
  });

  test("fewer dimensions are the first ones, of length 1", async () => {
    const [whole] = await embed({ input: text });
    const first = whole.slice(0, 8);
    const [short] = await embed({ input: text, dimensions: 8 });
    assertClose(short, first.map((x) => x / length(first)));
    await assert.rejects(embed({ input: text, dimensions: whole.length + 1 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "dimensions");
      return true;
    });
  });
});
