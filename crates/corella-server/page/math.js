// Formulas, drawn by KaTeX, which is loaded when the first one is seen. Until then, and where KaTeX cannot read a
// formula, its source is shown.

import { element } from "./format.js";

const FOLDER = new URL("./vendor/katex/", import.meta.url);

/** A longer text between signs is not a formula, and would hold up the page. */
const MAX_LENGTH = 4000;

/** A formula is a model's text: it may not load, link, style or define anything, nor grow without limit. */
const OPTIONS = {
  trust: false,
  strict: "ignore",
  throwOnError: true,
  maxSize: 20,
  maxExpand: 300,
  output: "htmlAndMathml",
};

let katex = null;
let loading = null;
let waiting = [];

/** `isDisplayed` means that the formula is on lines of its own. */
export function formula(tex, source, isDisplayed) {
  const box = element("span", { className: isDisplayed ? "math displayed" : "math", textContent: source });
  if (isDisplayed) {
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Formula");
  }
  if (tex.length <= MAX_LENGTH) {
    const draw = () => render(box, tex, isDisplayed);
    if (katex) {
      draw();
    } else {
      waiting.push(draw);
      load();
    }
  }
  return box;
}

/** Loads KaTeX. After a failure, for example of the network, the next formula tries again. */
function load() {
  loading ??= Promise.all([import(new URL("katex.min.js", FOLDER)), styles()]).then(
    () => {
      ({ katex } = globalThis);
      waiting.forEach((draw) => draw());
      waiting = [];
    },
    () => {
      loading = null;
      waiting = [];
    },
  );
}

function styles() {
  const link = element("link", { rel: "stylesheet", href: new URL("katex.min.css", FOLDER) });
  return new Promise((resolve, reject) => {
    link.addEventListener("load", resolve);
    link.addEventListener("error", () => {
      link.remove();
      reject(new Error("no styles"));
    });
    document.head.append(link);
  });
}

function render(box, tex, isDisplayed) {
  const drawn = element("span");
  try {
    katex.render(tex, drawn, { ...OPTIONS, displayMode: isDisplayed });
  } catch {
    // The source stays. KaTeX fails for wrong formulas, and for formulas that are nested too deep.
    box.classList.add("unread");
    return;
  }
  box.replaceChildren(...drawn.childNodes);
}

const SIGNS = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"], ["$", "$"]];

/** The element of the formula that begins at a place within a line, and where it ends. `null` if there is none. */
export function readFormula(text, at, missing) {
  const found = formulaAt(text, at, missing);
  return found && [formula(found.tex, text.slice(at, found.end), found.isDisplayed), found.end];
}

/** Returns a formula as `{ tex, end, isDisplayed }`. `missing` collects the signs whose closing sign is missing. */
export function formulaAt(text, at, missing) {
  const [open, close] = SIGNS.find(([sign]) => text.startsWith(sign, at)) ?? [];
  if (!open || missing.has(open)) {
    return null;
  }
  const begin = at + open.length;
  let end = text.indexOf(close, begin);
  while (open === "$" && text[end - 1] === "\\") {
    end = text.indexOf(close, end + 1);
  }
  if (end === -1) {
    missing.add(open);
    return null;
  }
  const tex = text.slice(begin, end);
  if (tex.trim() === "" || (open === "$" && isMoney(tex, text[end + 1]))) {
    return null;
  }
  return { tex, end: end + close.length, isDisplayed: open === "$$" || open === "\\[" };
}

/** `$` means money if a blank follows the first sign or precedes the second, or if a digit follows the second. */
const isMoney = (tex, next = "") => /^\s|\s$/.test(tex) || /\d/.test(next);

const BLOCKS = SIGNS.slice(0, 2);

/** Limits the lines of a formula, so that a sign without a closing sign costs little. */
const MAX_LINES = 100;

/** Returns the end of a formula that fills whole lines, and a function that makes its element. */
export function formulaBlock(lines, at) {
  const first = lines[at].trimStart();
  const [open, close] = BLOCKS.find(([sign]) => first.startsWith(sign)) ?? [];
  if (!open) {
    return null;
  }
  const tex = [];
  for (let end = at; end < Math.min(at + MAX_LINES, lines.length); end += 1) {
    const line = end === at ? first.slice(open.length) : lines[end];
    const found = line.indexOf(close);
    if (found === -1) {
      tex.push(line);
      continue;
    }
    tex.push(line.slice(0, found));
    const isAlone = line.slice(found + close.length).trim() === "" && tex.some((part) => part.trim() !== "");
    const source = lines.slice(at, end + 1).join("\n");
    return isAlone ? [end + 1, () => formula(tex.join("\n"), source, true)] : null;
  }
  return null;
}
