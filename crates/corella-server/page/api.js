// Calls of the server: the API key, errors as the server words them, and server-sent events.

import { readText, writeText } from "./storage.js";

const KEY = "corella.key";

/** The server's URL, with the path prefix of a proxy: this file is at `page/api.js` below this URL. */
const SERVER = new URL("..", import.meta.url);

let key = readText("tab", KEY) ?? "";

/** The key is forgotten with the tab. */
export const apiKey = {
  get: () => key,
  set: (text) => {
    key = text;
    writeText("tab", KEY, text);
  },
};

/** An answer other than 2xx, or no answer, with `status` 0. `param` names the faulty field, if there is one. */
export class CallError extends Error {
  constructor(message, status, { param = null, code = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
  }
}

/** Calls a path, such as `/v1/models`, with the API key. Throws a CallError, or the signal's AbortError. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey.get() !== "") {
    headers.authorization = `Bearer ${apiKey.get()}`;
  }
  const options = { headers, signal };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    options.method = "POST";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(new URL(`.${path}`, SERVER), options);
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new CallError("The server does not answer.", 0);
  }
  if (!response.ok) {
    const error = await response.json().then((json) => json.error, () => null);
    throw new CallError(error?.message ?? `The server answered ${response.status}.`, response.status, error ?? {});
  }
  return response;
}

/** The events of a response as `{ name, data }`, with `data` parsed unless it is `[DONE]`. Comments are left out. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) {
        return;
      }
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      // A comment says that the server still works.
      for (const part of parts.filter((part) => !part.startsWith(":"))) {
        yield parse(part);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(event) {
  let name = "message";
  let data = "";
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) {
      name = line.slice("event: ".length);
    } else if (line.startsWith("data: ")) {
      data += line.slice("data: ".length);
    }
  }
  return { name, data: data === "[DONE]" ? data : JSON.parse(data) };
}
