// The controls of sampling: one input for each field of a request.

import { element } from "./format.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any", hint: "0 always takes the top token" },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: "any", hint: "top tokens up to this total probability" },
  { name: "top_k", label: "Top k", min: 0, step: 1, hint: "number of top tokens; 0 takes all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any", hint: "minimum probability relative to the top token" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, step: "any", hint: "above 1 repeats less" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: "any", hint: "discourages tokens that were used" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: "any", hint: "discourages them more with each use" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, hint: "longest answer" },
  { name: "seed", label: "Seed", min: 0, step: 1, hint: "equal seeds give equal answers" },
  { name: "stop", label: "Stop", hint: "ends the answer; separate several with |" },
];

export class Sampling {
  constructor(grid, settings, changed) {
    this.inputs = new Map();
    this.helps = new Map();
    for (const { name, label, hint, ...range } of FIELDS) {
      const isText = name === "stop";
      const input = element("input", { id: `sampling-${name}`, name, autocomplete: "off", placeholder: "default" });
      input.type = isText ? "text" : "number";
      for (const [attribute, value] of Object.entries(range)) {
        input.setAttribute(attribute, value);
      }
      const help = element("small", { id: `help-${name}`, textContent: hint });
      input.setAttribute("aria-describedby", help.id);
      input.value = settings[name] ?? "";
      input.addEventListener("input", () => {
        this.#unmark(name);
        changed();
      });
      this.inputs.set(name, input);
      this.helps.set(name, { help, hint });
      grid.append(element("label", {}, label, input, help));
    }
  }

  /** Shows the server's values in empty inputs. `defaults` has them by the names of the fields. */
  showDefaults(defaults) {
    for (const [name, input] of this.inputs) {
      const value = defaults[name];
      // The server writes "no limit" and "no seed" as -1.
      input.placeholder = typeof value === "number" && value >= 0 ? `${value}` : "default";
    }
  }

  /** The values of filled inputs, by field, as strings, for the storage. */
  values() {
    const filled = [...this.inputs].filter(([, input]) => input.value !== "");
    return Object.fromEntries(filled.map(([name, input]) => [name, input.value]));
  }

  /** The fields of a request. Ranges are for the server to check. */
  fields() {
    const fields = {};
    for (const [name, value] of Object.entries(this.values())) {
      fields[name] = name === "stop" ? value.split("|").filter((text) => text !== "") : Number(value);
    }
    return fields;
  }

  reset() {
    for (const [name, input] of this.inputs) {
      input.value = "";
      this.#unmark(name);
    }
  }

  /** Shows beside an input why its value was refused. Returns the input, or `null` if the field has no input here. */
  mark(param, message) {
    const name = param.split("[")[0];
    const input = this.inputs.get(name);
    if (!input) {
      return null;
    }
    input.setAttribute("aria-invalid", "true");
    this.helps.get(name).help.textContent = message;
    return input;
  }

  #unmark(name) {
    this.inputs.get(name).removeAttribute("aria-invalid");
    const { help, hint } = this.helps.get(name);
    help.textContent = hint;
  }
}
