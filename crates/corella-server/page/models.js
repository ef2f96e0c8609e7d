// The models of the server: the menu of the conversation, and the list in the picture of the engine.

import { call } from "./api.js";
import { bytes, element } from "./format.js";
import { readText, writeText } from "./storage.js";

const KEY = "corella.model";

/** The list is read this often while a model may come or go. */
const PERIOD_MS = 1000;

const at = (id) => document.getElementById(id);

/** The state of a model in words. */
export function stateOf({ value, loading_s: seconds }) {
  if (value === "loading") {
    return seconds === undefined ? "waiting for its load" : `loading, ${Math.floor(seconds)} s`;
  }
  return value === "unloaded" ? "not loaded" : value;
}

/** Aliases and adapters are listed, too; they come and go with their model. */
const modelOf = ({ id, root, parent }) => parent ?? root ?? id;

/** One entry for each model: its own name, or the first name that the key permits. */
function modelsIn(list) {
  const named = list.filter((entry) => modelOf(entry) === entry.id);
  const seen = new Set(named.map(modelOf));
  const others = list.filter((entry) => {
    const isNew = entry.parent === undefined && !seen.has(modelOf(entry));
    seen.add(modelOf(entry));
    return isNew;
  });
  return [...named, ...others];
}

export class Models {
  /** `changed` is called with the chosen model when the list was read, or another model was chosen. */
  constructor(changed) {
    this.changed = changed;
    this.list = [];
    this.isReading = false;
    at("model").addEventListener("change", ({ target }) => {
      writeText("browser", KEY, target.value);
      this.#show();
    });
    setInterval(() => this.#tick(), PERIOD_MS);
  }

  get isKnown() {
    return !at("model").disabled;
  }

  /** Whether questions have to name the model: there are several, or the key permits only other names of the one. */
  get haveToBeNamed() {
    const names = new Set(this.list.map(modelOf));
    return names.size > 1 || (names.size === 1 && !this.list.some(({ id }) => names.has(id)));
  }

  async read(path = "/v1/models") {
    const response = await call(path);
    const { data } = await response.json();
    const select = at("model");
    const chosen = this.isKnown ? select.value : readText("browser", KEY);
    this.list = data;
    if ([...select.options].map(({ value }) => value).join("\n") !== data.map(({ id }) => id).join("\n")) {
      select.replaceChildren(...data.map(({ id }) => element("option", { value: id })));
      if (data.some(({ id }) => id === chosen)) {
        select.value = chosen;
      }
    }
    select.disabled = false;
    this.#show();
  }

  /** A model that stays loaded needs no further look. */
  #tick() {
    const mayChange = this.haveToBeNamed || this.list.some(({ status }) => status && status.value !== "loaded");
    if (!document.hidden && mayChange && !this.isReading) {
      this.isReading = true;
      this.read(`/page/models.json`).catch(() => {}).finally(() => { this.isReading = false; });
    }
  }

  #show() {
    const select = at("model");
    const models = modelsIn(this.list);
    const showsStates = models.length > 1 || models.some(({ status }) => status && status.value !== "loaded");
    this.list.forEach(({ id, status }, index) => {
      const text = showsStates && status ? `${id} · ${stateOf(status)}` : id;
      const option = select.options[index];
      if (option.textContent !== text) {
        option.textContent = text;
      }
    });
    document.title = `${select.value} · Corella`;
    this.#list(showsStates ? models : []);
    this.changed(this.list[select.selectedIndex]);
  }

  #list(models) {
    at("models").hidden = models.length === 0;
    const total = models.reduce((sum, { status }) => sum + (status?.memory_bytes ?? 0), 0);
    at("models-note").textContent = `${bytes(total)} together`;
    at("model-rows").replaceChildren(...models.map(row));
  }
}

function row({ id, status }) {
  const properties = { className: `tag ${status.value}-tag`, title: status.error ?? "" };
  const tag = element("span", properties, element("i"), stateOf(status));
  const memory = status.memory_bytes ? bytes(status.memory_bytes) : "–";
  const cells = [element("span", { textContent: id, title: id }), tag, memory];
  return element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
}
