// Vercel's AI SDK by its default provider, which speaks the Responses API and names items of earlier answers by their
// ids instead of repeating them.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const NUM_TURNS = 5;

// The kinds of the items that requests name.
const named = new Set();
const openai = createOpenAI({
  baseURL: `${process.env.CORELLA_SCRIPTED_URL}/v1`,
  apiKey: "unused",
  fetch: (url, options) => {
    const items = JSON.parse(options.body).input.filter((item) => item.type === "item_reference");
    for (const item of items) named.add(item.id.split("_")[0]);
    return fetch(url, options);
  },
});
const model = openai(process.env.CORELLA_SCRIPTED_MODEL);

async function converse(ask) {
  const turns = [];
  const look = tool({
    description: "Looks a turn up",
    inputSchema: z.object({ turn: z.number().int() }),
    execute: ({ turn }) => (turns.push(turn), `Result ${turn}.`),
  });
  const messages = [];
  for (let turn = 0; turn < NUM_TURNS; turn++) {
    messages.push({ role: "user", content: `Question ${turn}.` });
    const result = ask({ model, messages, tools: { look }, stopWhen: stepCountIs(3), maxRetries: 0 });
    const { text, response } = await result;
    assert.equal(await text, `Answer ${turn}.`);
    messages.push(...(await response).messages);
  }
  assert.deepEqual(turns, [...Array(NUM_TURNS).keys()]);
}

test("five turns with tools are whole answers", () => converse(generateText));

test("five turns with tools are streams", () => converse((options) => streamText(options)));

// The client repeats calls instead of naming them.
test("messages and thoughts are named by their ids", () => {
  assert.deepEqual([...named].sort(), ["msg", "rs"]);
});
