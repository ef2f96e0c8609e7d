// Calls of operations for a shell, with the fields that their schemas require.

const MAX_DEPTH = 4;

/** Example values for fields whose schema is wider than sensible values. */
const KNOWN = {
  messages: [{ role: "user", content: "Tell me a story about a cat who found a key." }],
  prompt: "Once upon a time",
  input: "A cat found a key.",
  content: "A cat found a key.",
  query: "Who found a key?",
  documents: ["A cat found a key.", "It rains."],
  text_1: "Who found a key?",
  text_2: "A cat found a key.",
  data_1: "Who found a key?",
  data_2: "A cat found a key.",
  tokens: [1, 2, 3],
  max_tokens: 100,
};

const INPUTS = ["messages", "prompt", "input", "content", "query", "tokens", "text_1"];

export function exampleCall(method, path, requestBody, api, server) {
  const json = requestBody?.content["application/json"]?.schema;
  const parts = [`curl ${server}${path}`];
  if (json) {
    parts.push("-H 'content-type: application/json'");
    // A single quote would end the shell's text.
    parts.push(`-d '${JSON.stringify(valueOf(json, api, 0)).replaceAll("'", "'\\''")}'`);
  } else if (requestBody) {
    parts.push("-F purpose=batch -F file=@requests.jsonl");
  } else if (method !== "get") {
    parts[0] = `curl -X ${method.toUpperCase()} ${server}${path}`;
  }
  return parts.join(" \\\n  ");
}

function valueOf(schema, api, depth) {
  if (schema.$ref) {
    return valueOf(api.components.schemas[schema.$ref.split("/").at(-1)] ?? {}, api, depth);
  }
  const [choice] = schema.anyOf ?? schema.oneOf ?? [];
  if (choice) {
    return valueOf(choice, api, depth);
  }
  if (schema.const !== undefined || schema.enum) {
    return schema.const ?? schema.enum[0];
  }
  if (schema.properties && depth < MAX_DEPTH) {
    const names = [...(schema.required ?? [])];
    // Where one of several inputs is required, the schema names none of them.
    const input = INPUTS.find((name) => name in schema.properties);
    if (depth === 0 && input && !INPUTS.some((name) => names.includes(name))) {
      names.push(input);
    }
    return Object.fromEntries(names.map((name) => [name, KNOWN[name] ?? valueOf(schema.properties[name] ?? {}, api, depth + 1)]));
  }
  const [type] = [schema.type ?? "string"].flat();
  return { array: [], object: {}, integer: 1, number: 1, boolean: true }[type] ?? "…";
}
