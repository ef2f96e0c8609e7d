// Puts the page together: theme, views, API key, models.

import { apiKey, call } from "./api.js";
import { Chat } from "./chat.js";
import { Engine } from "./engine.js";
import { EngineView } from "./engine_view.js";
import { drawIcons } from "./icons.js";
import { Models } from "./models.js";
import { writeText } from "./storage.js";

const MODELS_RETRY_MS = 3000;

const at = (id) => document.getElementById(id);

drawIcons();
const chat = new Chat(askForKey);
const engine = new Engine(askForKey, (server, isOther) => {
  chat.maxAlternatives = Math.min(5, server.max_logprobs);
  // Another server may have another model.
  if (isOther) {
    readAgain();
  }
}, readAgain);
/** The chosen model, and whether its defaults are shown. */
let shown = { id: null, isLoaded: false };
const models = new Models((model) => {
  chat.contextLength = model?.max_model_len ?? null;
  chat.showModel(model);
  engine.setModel(models.haveToBeNamed ? model?.id : null, model?.status);
  const now = { id: model?.id, isLoaded: (model?.status?.value ?? "loaded") === "loaded" };
  if (now.id !== shown.id || now.isLoaded !== shown.isLoaded) {
    shown = now;
    readDefaults(now).catch(() => {});
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

/** Shows the model's sampling defaults in empty fields. A model that is not loaded tells none. */
async function readDefaults({ id, isLoaded }) {
  let params = {};
  if (isLoaded) {
    const response = await call(models.haveToBeNamed ? `/props?model=${encodeURIComponent(id)}` : "/props");
    const { default_generation_settings: settings } = await response.json();
    params = settings?.params ?? {};
  }
  chat.settings.sampling.showDefaults({ ...params, repetition_penalty: params.repeat_penalty });
}
/** Adapters come and go, so the list is read again when the page is seen again. */
document.addEventListener("visibilitychange", () => document.hidden || readAgain());

function readAgain() {
  shown = { id: null, isLoaded: false };
  models.read().catch(() => {});
}

/** Reads the models again after a failed attempt. Meanwhile the chat uses the server's default model. */
function readModelsAgain() {
  if (!models.isKnown) {
    models.read().catch(({ status }) => status === 401 || setTimeout(readModelsAgain, MODELS_RETRY_MS));
  }
}

async function start() {
  try {
    await models.read();
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
