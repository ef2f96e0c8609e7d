// The KV pages as a map, a cell for each page or group of pages, and the number of pages of each kind.

import { colour, prepare } from "./chart.js";
import { count, element } from "./format.js";

/** Letter of the stream, class, name, field of `kv`; the last two kinds exist only beside other nodes. */
const KINDS = [
  ["u", "in-use", "in use", "in_use"],
  ["c", "cached", "cached", "cached"],
  [".", "free", "free", "free"],
  ["r", "received", "received", "received"],
  ["h", "held", "held for others", "held"],
];
const NUM_ALWAYS_SHOWN = 3;

const MAX_CELL = 13;
const MIN_CELL = 3;

/** The map is low while nearly all pages are free. Once more pages were used, it stays high. */
const LOW_HEIGHT = 90;
const HEIGHT = 190;
const NEARLY_FREE = 0.9;

export class PageMap {
  constructor(canvas, legend, note) {
    this.canvas = canvas;
    this.legend = legend;
    this.note = note;
    this.kv = null;
    this.maxHeight = LOW_HEIGHT;
  }

  push(kv) {
    this.kv = kv;
    if (kv.free < NEARLY_FREE * kv.pages) {
      this.maxHeight = HEIGHT;
    }
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!this.kv || width === 0) {
      return;
    }
    const { cells, pages_per_cell: perCell } = this.kv.map;
    const size = cellSize(cells.length, width, this.maxHeight);
    const perRow = Math.max(Math.floor(width / size), 1);
    const height = Math.ceil(cells.length / perRow) * size;
    if (this.canvas.style.height !== `${height}px`) {
      this.canvas.style.height = `${height}px`;
    }
    const surface = prepare(this.canvas);
    if (!surface) {
      return;
    }
    const gap = size > 5 ? 1.5 : size > 3 ? 1 : 0.5;
    const colours = new Map(KINDS.map(([letter, className]) => [letter, colour(className)]));
    for (let cell = 0; cell < cells.length; cell += 1) {
      surface.context.fillStyle = colours.get(cells[cell]);
      const [x, y] = [(cell % perRow) * size, Math.floor(cell / perRow) * size];
      surface.context.fillRect(x, y, size - gap, size - gap);
    }
    this.#describe(perCell);
  }

  #describe(perCell) {
    const { kv } = this;
    const shown = KINDS.filter(([, , , field], index) => index < NUM_ALWAYS_SHOWN || kv[field] > 0);
    // Received and held pages count as in use, too, but have colours of their own.
    const numbers = { ...kv, in_use: kv.in_use - kv.received - kv.held };
    const parts = shown.map(([, , name, field]) => `${count(numbers[field])} ${name}`);
    const others = [["pinned", kv.pinned], ["in host memory", kv.spilled]].filter(([, num]) => num > 0);
    const items = shown.map(([, className], index) => element("li", {}, element("i", { className }), parts[index]));
    items.push(...others.map(([name, num]) => element("li", { textContent: `${count(num)} ${name}` })));
    this.legend.replaceChildren(...items);
    const cell = perCell === 1 ? "" : `, ${count(perCell)} a cell`;
    this.note.textContent = `${count(kv.pages)}${cell}`;
    this.canvas.setAttribute("aria-label", `${count(kv.pages)} KV pages: ${parts.join(", ")}`);
  }
}

/** Returns the largest size of a cell with which all cells fit. */
function cellSize(num, width, maxHeight) {
  for (let size = MAX_CELL; size > MIN_CELL; size -= 1) {
    if (Math.ceil(num / Math.floor(width / size)) * size <= maxHeight) {
      return size;
    }
  }
  return MIN_CELL;
}
