// The settings of the chat: system prompt, sampling, probabilities. They are kept in the browser's storage.

import { Sampling } from "./sampling.js";
import { readJson, writeJson } from "./storage.js";

const KEY = "corella.settings";

const at = (id) => document.getElementById(id);

export class Settings {
  /** `onProbabilities` is called when probabilities are switched on or off. */
  constructor(onProbabilities) {
    const stored = readJson("browser", KEY) ?? {};
    this.sampling = new Sampling(at("sampling"), stored.sampling ?? {}, () => this.#save());
    at("system").value = stored.system ?? "";
    at("probabilities").checked = stored.probabilities ?? false;
    at("system").addEventListener("input", () => this.#save());
    at("probabilities").addEventListener("change", () => {
      this.#save();
      onProbabilities();
    });
    at("reset-sampling").addEventListener("click", () => {
      this.sampling.reset();
      this.#save();
    });
    const dialog = at("settings");
    at("settings-open").addEventListener("click", () => dialog.showModal());
    at("settings-close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close());
    this.#summarise();
  }

  get system() {
    return at("system").value;
  }

  get showsTokens() {
    return at("probabilities").checked;
  }

  /** Focuses the control of the refused field, if there is one. */
  mark(error) {
    const input = error.param && this.sampling.mark(error.param, error.message);
    if (input) {
      at("settings").showModal();
      input.focus();
    }
  }

  #save() {
    writeJson("browser", KEY, {
      system: this.system,
      sampling: this.sampling.values(),
      probabilities: this.showsTokens,
    });
    this.#summarise();
  }

  /** Shows the settings that differ from the defaults, for readers who have not opened the dialog. */
  #summarise() {
    const parts = Object.entries(this.sampling.values()).map(([name, value]) => `${name} ${value}`);
    if (this.system.trim() !== "") {
      parts.unshift("system prompt");
    }
    at("settings-summary").textContent = parts.length === 0 ? "" : `With ${parts.join(", ")}`;
  }
}
