// Puts the page together: theme, views, API key, models.

import { apiKey, call } from "./api.js";
import { Chat } from "./chat.js";
import { Engine } from "./engine.js";
import { EngineView } from "./engine_view.js";
import { element } from "./format.js";
import { drawIcons } from "./icons.js";
import { readText, writeText } from "./storage.js";

const MODELS_RETRY_MS = 3000;

const at = (id) => document.getElementById(id);

drawIcons();
const chat = new Chat(askForKey);
const engine = new Engine(askForKey, (server, isOther) => {
  chat.maxAlternatives = Math.min(5, server.max_logprobs);
  // Another server may have another model.
  if (isOther) {
    readModels().catch(() => {});
  }
});

function chooseTheme(theme) {
  writeText("browser", "corella.theme", theme);
  if (theme === "system") {
    delete document.documentElement.dataset.theme;
  } else {
    document.documentElement.dataset.theme = theme;
  }
  engine.draw();
}
at("theme").value = document.documentElement.dataset.theme ?? "system";
at("theme").addEventListener("change", ({ target }) => chooseTheme(target.value));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.draw());

new EngineView(() => engine.update());

function askForKey() {
  const form = at("key-form");
  at("key-error").textContent = apiKey.get() === "" ? "" : "The server refuses this key.";
  if (form.hidden) {
    form.hidden = false;
    at("key").focus();
  }
}
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set(at("key").value.trim());
  at("key").value = "";
  at("key-form").hidden = true;
  start();
});

/** Adapters come and go, so the list is read again when the page is seen again. */
async function readModels() {
  const response = await call("/v1/models");
  const { data } = await response.json();
  const select = at("model");
  const chosen = select.disabled ? readText("browser", "corella.model") : select.value;
  select.replaceChildren(...data.map(({ id }) => element("option", { value: id, textContent: id })));
  select.disabled = false;
  if (data.some(({ id }) => id === chosen)) {
    select.value = chosen;
  }
  chat.contextLength = data[0]?.max_model_len ?? null;
  showModel();
  readDefaults().catch(() => {});
}

function showModel() {
  document.title = `${at("model").value} · Corella`;
}
at("model").addEventListener("change", ({ target }) => {
  writeText("browser", "corella.model", target.value);
  showModel();
});

/** Shows the server's sampling defaults in empty fields. */
async function readDefaults() {
  const response = await call("/props");
  const { default_generation_settings: settings } = await response.json();
  const params = settings?.params ?? {};
  chat.settings.sampling.showDefaults({ ...params, repetition_penalty: params.repeat_penalty });
}
document.addEventListener("visibilitychange", () => document.hidden || readModels().catch(() => {}));

/** Reads the models again after a failed attempt. Meanwhile the chat uses the server's default model. */
function readModelsAgain() {
  if (at("model").disabled) {
    readModels().catch(({ status }) => status === 401 || setTimeout(readModelsAgain, MODELS_RETRY_MS));
  }
}

async function start() {
  try {
    await readModels();
  } catch (error) {
    if (error.status === 401) {
      askForKey();
    } else {
      setTimeout(readModelsAgain, MODELS_RETRY_MS);
    }
  }
  engine.restart();
}

start();
