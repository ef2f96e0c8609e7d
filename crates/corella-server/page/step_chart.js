// What each step computed: a bar as wide as the step was long, with its decode, prefill and draft tokens stacked.
//
// Heights grow with the square root, so that a few decodes can be seen beside a chunk of a prompt.

import { SPAN_MS, ceiling, colour, dropOld, frame, prepare } from "./chart.js";
import { count } from "./format.js";

const KINDS = ["decode", "prefill", "draft"];

export class StepChart {
  constructor(canvas) {
    this.canvas = canvas;
    this.steps = [];
  }

  /** `now` is the engine's time at which the snapshot was made. */
  push(steps, now) {
    for (const { ago_ms, ms, steps: num, prefill_tokens, decode_tokens, draft_tokens } of steps) {
      // A record of several steps is drawn as their mean.
      this.steps.push({
        time: now - ago_ms,
        ms,
        num,
        prefill: prefill_tokens / num,
        decode: decode_tokens / num,
        draft: draft_tokens / num,
      });
    }
    this.moveTo(now);
  }

  /** The engine's time at the right end. */
  moveTo(now) {
    dropOld(this.steps, now);
    this.now = now;
  }

  clear() {
    this.steps = [];
  }

  draw() {
    const surface = prepare(this.canvas);
    if (!surface) {
      return;
    }
    const { context } = surface;
    const total = (step) => step.prefill + step.decode + step.draft;
    const most = Math.max(8, ...this.steps.map(total));
    // The label at half height is a quarter of `top`, which is always a whole number.
    const top = ceiling(most, [2, 4, 8, 20]);
    const area = frame(surface, top / 4, top, count);
    const colours = KINDS.map(colour);
    // Where steps are narrower than a pixel, each column shows the largest of them.
    const columns = new Map();
    for (const step of this.steps) {
      const end = area.left + area.width * (1 - (this.now - step.time) / SPAN_MS);
      const width = Math.max((area.width * step.ms) / SPAN_MS, 1);
      const column = width > 2 ? end - width : Math.floor(end - width);
      const other = columns.get(column);
      if (!other || total(other.step) < total(step)) {
        columns.set(column, { step, width: width > 2 ? width - 0.5 : 1 });
      }
    }
    for (const [left, { step, width }] of columns) {
      let sum = 0;
      let below = area.top + area.height;
      for (const [index, kind] of KINDS.entries()) {
        if (step[kind] > 0) {
          sum += step[kind];
          const y = Math.min(area.top + area.height * (1 - Math.sqrt(sum / top)), below - 1);
          context.fillStyle = colours[index];
          context.fillRect(left, y, width, below - y);
          below = y;
        }
      }
    }
    this.#describe();
  }

  #describe() {
    const sum = (kind) => this.steps.reduce((total, step) => total + step[kind] * step.num, 0);
    const num = this.steps.reduce((total, step) => total + step.num, 0);
    const what = KINDS.map((kind) => `${count(Math.round(sum(kind)))} ${kind}`).join(", ");
    const text = num === 0 ? "No step in the last minute" : `Last minute: ${count(num)} steps with ${what} tokens`;
    this.canvas.setAttribute("aria-label", text);
  }
}
