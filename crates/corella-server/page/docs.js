// The page of the API, made from `/openapi.json`.

import { call } from "./api.js";
import { copy } from "./clipboard.js";
import { element } from "./format.js";
import { iconButton } from "./icons.js";
import { addressOf, typeOf } from "./schema.js";
import { exampleCall } from "./schema_example.js";

const at = (id) => document.getElementById(id);

/** The groups of operations. An operation belongs to the first group that fits. */
const GROUPS = [
  ["Ollama’s API", (path) => path.startsWith("/api/")],
  ["Anthropic’s API", (path) => path.startsWith("/v1/messages")],
  ["llama-server’s API", (_, { summary }) => summary.includes("llama-server")],
  ["OpenAI’s and vLLM’s API", (path) => path.startsWith("/v1/") && !path.includes("health")],
  ["The server", () => true],
];

const ORDER = ["OpenAI’s and vLLM’s API", "Anthropic’s API", "Ollama’s API", "llama-server’s API", "The server"];

/** Operations with the same effect are shown as one, under the path with a version. */
function operationsOf({ paths }) {
  const found = new Map();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const body = operation.requestBody?.content["application/json"]?.schema.$ref ?? path.includes("{");
      const key = [method, operation.summary, body].join(" ");
      const same = found.get(key);
      if (same) {
        same.paths.push(path);
        same.paths.sort((one, other) => other.startsWith("/v1/") - one.startsWith("/v1/"));
      } else {
        found.set(key, { method, paths: [path], operation });
      }
    }
  }
  return [...found.values()];
}

function entry(id, head, makeContent, words) {
  const content = element("div", { className: "content" });
  const made = element("details", { id, className: "entry" }, element("summary", {}, ...head), content);
  made.words = words.toLowerCase();
  made.addEventListener("toggle", () => {
    if (made.open && content.childNodes.length === 0) {
      content.append(...makeContent());
    }
  });
  return made;
}

function operationEntry({ method, paths: [path, ...others], operation }, api) {
  const head = [
    element("span", { className: `method ${method}`, textContent: method.toUpperCase() }),
    element("span", { className: "path", textContent: path }),
    element("span", { className: "about", textContent: operation.summary }),
  ];
  const content = () => {
    const parts = [];
    if (operation.description) {
      parts.push(element("p", { textContent: operation.description }));
    }
    if (others.length > 0) {
      parts.push(element("p", {}, "Also at ", ...joined(others.map((other) => element("code", { textContent: other })))));
    }
    const { parameters = [], requestBody, responses } = operation;
    if (parameters.length > 0) {
      parts.push(title("Parameters"), fields(parameters.map(({ name, required, schema, description }) => [name, { description, ...schema }, required])));
    }
    for (const [kind, { schema }] of Object.entries(requestBody?.content ?? {})) {
      parts.push(title(`Body, ${kind}`), ...schemaParts(schema, api));
    }
    parts.push(title("Example"), code(exampleCall(method, path, requestBody, api, serverAddress())));
    parts.push(title("Answers"), answers(responses));
    return parts;
  };
  return entry(addressOf(`${method} ${path}`), head, content, `${method} ${path} ${others.join(" ")} ${operation.summary}`);
}

function schemaEntry(name, schema, api) {
  const head = [element("span", { className: "path", textContent: name }), element("span", { className: "about", textContent: schema.description ?? "" })];
  return entry(addressOf(name), head, () => schemaParts(schema, api), name);
}

/** Describes a schema: its fields, or else its type. */
function schemaParts(schema, api) {
  const name = schema.$ref?.split("/").at(-1);
  const whole = name ? api.components.schemas[name] : schema;
  if (!whole?.properties) {
    return [element("p", {}, ...typeOf(whole ?? {}))];
  }
  const required = new Set(whole.required ?? []);
  const rows = Object.entries(whole.properties).map(([field, type]) => [field, type, required.has(field)]);
  rows.sort(([, , one], [, , other]) => Boolean(other) - Boolean(one));
  return [fields(rows)];
}

function fields(rows) {
  const items = rows.map(([name, schema, isRequired]) => {
    const label = element("span", { className: "name", textContent: name });
    if (isRequired) {
      label.append(" ", element("span", { className: "required", textContent: "required" }));
    }
    const about = schema.description ? [". ", schema.description] : [];
    return element("li", {}, label, element("span", { className: "type" }, ...typeOf(schema), ...about));
  });
  return element("ul", { className: "fields" }, ...items);
}

function answers(responses) {
  const items = Object.entries(responses).map(([status, { description, content = {} }]) => {
    const kinds = Object.entries(content).map(([kind, { schema }]) => {
      const type = schema ? [" ", ...typeOf(schema)] : [];
      return element("span", {}, element("code", { textContent: kind }), ...type);
    });
    const said = kinds.length > 0 ? [" ", ...joined(kinds)] : [];
    const name = status === "default" ? "other" : status;
    return element("li", {}, element("span", { className: "name", textContent: name }), element("span", { className: "type" }, description, ...said));
  });
  return element("ul", { className: "fields" }, ...items);
}

const title = (text) => element("h3", { textContent: text });

const joined = (nodes) => nodes.flatMap((node, index) => (index === 0 ? [node] : [", ", node]));

function code(text) {
  const button = iconButton("copy", "Copy", () => copy(text, button));
  const head = element("div", { className: "code-head" }, element("span", { textContent: "sh" }), button);
  const pre = element("pre", { textContent: text, tabIndex: 0 });
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", "Example");
  return element("div", { className: "code" }, head, pre);
}

const serverAddress = () => new URL(".", location.href).href.replace(/\/$/, "");

function draw(api) {
  at("about").textContent = `Version ${api.info.version}. ${api.info.description}`;
  const groups = new Map(ORDER.map((name) => [name, []]));
  for (const found of operationsOf(api)) {
    const [name] = GROUPS.find(([, fits]) => fits(found.paths[0], found.operation));
    groups.get(name).push(operationEntry(found, api));
  }
  const sections = [...groups].filter(([, entries]) => entries.length > 0);
  at("operations").append(...sections.map(([name, entries]) => section(name, entries)));
  const schemas = Object.entries(api.components.schemas).sort(([one], [other]) => one.localeCompare(other));
  at("schemas").append(section("Schemas", schemas.map(([name, schema]) => schemaEntry(name, schema, api))));
  filter();
  openNamed();
}

const section = (name, entries) => element("section", {}, element("h2", { textContent: name }), ...entries);

/** Shows the entries that have all words. */
function filter() {
  const words = at("filter").value.toLowerCase().split(/\s+/).filter((word) => word !== "");
  let num = 0;
  for (const part of document.querySelectorAll("section")) {
    const entries = [...part.querySelectorAll(".entry")];
    for (const shown of entries) {
      shown.hidden = !words.every((word) => shown.words.includes(word));
    }
    part.hidden = entries.every(({ hidden }) => hidden);
    num += entries.filter(({ hidden }) => !hidden).length;
  }
  at("no-match").hidden = num > 0;
}

/** Opens the entry that the address names. */
function openNamed() {
  const named = at(decodeURIComponent(location.hash.slice(1)));
  if (named?.classList.contains("entry")) {
    if (named.hidden) {
      at("filter").value = "";
      filter();
    }
    named.open = true;
    named.scrollIntoView();
  }
}

at("filter").addEventListener("input", filter);
addEventListener("hashchange", openNamed);
try {
  draw(await (await call("/openapi.json")).json());
} catch (error) {
  at("failure").textContent = error.message;
}
