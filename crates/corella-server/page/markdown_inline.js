// Markdown within a line: code, bold, italic, links, formulas.

import { element } from "./format.js";
import { formulaAt, readFormula } from "./math.js";

/** What goes deeper is shown as it was written. */
const MAX_DEPTH = 6;

const SPECIAL = /[\\`*_[$]|https?:\/\//g;
const TARGET = /\(\s*<?([^\s()<>"]*(?:\([^\s()"]*\)[^\s()<>"]*)*)>?(?:\s+"[^"\n]*")?\s*\)/y;
const BARE = /https?:\/\/[^\s<>"'`]+/y;
const ESCAPED = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;

/** The nodes of a text. */
export function inlines(text, depth = 0) {
  const nodes = [];
  // A sign whose counterpart is missing has none further on either. To know this keeps the time in proportion to the text.
  const missing = new Set();
  let plain = "";
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at === text.length) {
      break;
    }
    const [node, end] = read(text, at, depth, missing);
    if (typeof node === "string") {
      plain += node;
    } else {
      nodes.push(plain, node);
      plain = "";
    }
    at = end;
  }
  nodes.push(plain);
  return nodes.filter((node) => node !== "");
}

/** What begins at a sign, an element or plain text, and where it ends. */
function read(text, at, depth, missing) {
  const sign = text[at];
  if (sign === "\\" || sign === "$") {
    const found = readFormula(text, at, missing);
    if (found) {
      return found;
    }
  }
  if (sign === "$") {
    return [sign, at + 1];
  }
  if (sign === "\\") {
    const next = text[at + 1] ?? "";
    return ESCAPED.test(next) ? [next, at + 2] : [sign, at + 1];
  }
  if (sign === "`") {
    return codeSpan(text, at, missing);
  }
  if (depth >= MAX_DEPTH) {
    return [sign, at + 1];
  }
  const found =
    sign === "[" ? link(text, at, missing) : sign === "h" ? bareLink(text, at) : emphasis(text, at, depth, missing);
  return found ?? [sign, at + 1];
}

function codeSpan(text, at, missing) {
  const end = endOfRun(text, at);
  const fence = text.slice(at, end);
  const close = missing.has(fence) ? -1 : closingFence(text, end, fence);
  if (close === -1) {
    missing.add(fence);
    return [fence, end];
  }
  const inner = text.slice(end, close);
  const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
  return [element("code", { textContent: isPadded ? inner.slice(1, -1) : inner }), close + fence.length];
}

/** Where a run of exactly as many backticks begins. */
function closingFence(text, from, fence) {
  for (let at = text.indexOf("`", from); at !== -1; ) {
    const end = endOfRun(text, at);
    if (end - at === fence.length) {
      return at;
    }
    at = text.indexOf("`", end);
  }
  return -1;
}

function endOfRun(text, at) {
  let end = at;
  while (text[end] === text[at]) {
    end += 1;
  }
  return end;
}

function emphasis(text, at, depth, missing) {
  const sign = text[at];
  const mark = text[at + 1] === sign ? sign + sign : sign;
  const begin = at + mark.length;
  const isWithinWord = sign === "_" && WORD.test(text[at - 1] ?? "");
  if (isWithinWord || missing.has(mark) || /^\s?$/.test(text[begin] ?? "")) {
    return [mark, begin];
  }
  const end = closing(text, begin, mark);
  if (end === -1) {
    missing.add(mark);
    return [mark, begin];
  }
  const tag = mark.length === 2 ? "strong" : "em";
  return [element(tag, {}, ...inlines(text.slice(begin, end), depth + 1)), end + mark.length];
}

/** Where the mark comes again, at the end of a word and within neither code nor a formula. */
function closing(text, from, mark) {
  const sign = mark[0];
  const missing = new Set();
  for (let at = from; at < text.length; ) {
    const formula = text[at] === "\\" || text[at] === "$" ? formulaAt(text, at, missing) : null;
    if (formula) {
      at = formula.end;
    } else if (text[at] === "\\") {
      at += 2;
    } else if (text[at] === "`") {
      const end = endOfRun(text, at);
      const close = closingFence(text, end, text.slice(at, end));
      at = close === -1 ? end : close + end - at;
    } else if (text[at] === sign) {
      const end = endOfRun(text, at);
      const num = end - at;
      const endsWord = !/\s/.test(text[at - 1]) && !(sign === "_" && WORD.test(text[end] ?? ""));
      // Two signs alone do not end what one began: they are bold within it.
      const fits = mark.length === 2 ? num >= 2 : num !== 2;
      if (at > from && endsWord && fits) {
        return end - mark.length;
      }
      at = end;
    } else {
      at += 1;
    }
  }
  return -1;
}

function link(text, at, missing) {
  const close = missing.has("]") ? -1 : text.indexOf("]", at);
  if (close === -1) {
    missing.add("]");
    return null;
  }
  TARGET.lastIndex = close + 1;
  const target = TARGET.exec(text);
  const address = target && webAddress(target[1]);
  const label = text.slice(at + 1, close);
  if (!address || label.trim() === "" ) {
    return null;
  }
  // A link has no links in it.
  return [anchor(address, inlines(label, MAX_DEPTH)), TARGET.lastIndex];
}

function bareLink(text, at) {
  BARE.lastIndex = at;
  // What ends a sentence or closes a bracket is not part of the address.
  const found = BARE.exec(text)?.[0].replace(/[.,:;!?*_\]]+$/, "") ?? "";
  const written = found.includes("(") ? found : found.replace(/\).*$/, "");
  const address = webAddress(written);
  return address && !WORD.test(text[at - 1] ?? "") ? [anchor(address, [written]), at + written.length] : null;
}

function anchor(href, nodes) {
  return element("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...nodes);
}

/** `null` for what is not an address of the web, such as `javascript:`. */
function webAddress(written) {
  const url = URL.parse ? URL.parse(written) : URL.canParse(written) ? new URL(written) : null;
  return url && ["http:", "https:"].includes(url.protocol) ? url.href : null;
}
