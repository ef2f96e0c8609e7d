// Shows and hides the picture of the engine. A hidden picture is folded into a strip. A shown picture is beside the
// chat if both fit.

import { readText, writeText } from "./storage.js";

const KEY = "corella.picture";

const at = (id) => document.getElementById(id);

/** Screens on which the picture does not replace the chat. */
const WIDE = matchMedia("(min-width: 1100px)");

export class EngineView {
  /** `changed` is called when the picture is shown or hidden. */
  constructor(changed) {
    this.changed = changed;
    for (const id of ["strip", "engine-toggle"]) {
      at(id).addEventListener("click", () => this.#show(at("engine").hidden));
    }
    at("engine-close").addEventListener("click", () => {
      this.#show(false);
      [at("strip"), at("engine-toggle")].find(({ clientWidth }) => clientWidth > 0)?.focus();
    });
    WIDE.addEventListener("change", () => this.#place());
    at("engine").hidden = !WIDE.matches || readText("browser", KEY) !== "shown";
    this.#place();
  }

  #show(isShown) {
    // A small screen begins with the chat.
    if (WIDE.matches) {
      writeText("browser", KEY, isShown ? "shown" : "hidden");
    }
    at("engine").hidden = !isShown;
    this.#place();
  }

  #place() {
    const isShown = !at("engine").hidden;
    at("chat").hidden = isShown && !WIDE.matches;
    for (const id of ["strip", "engine-toggle"]) {
      at(id).setAttribute("aria-expanded", String(isShown));
    }
    this.changed();
  }
}
