// Draws answers in Markdown as elements. A model's text is never read as HTML.
//
// The text may end anywhere, because it is drawn while it comes. Only blocks that changed are drawn again.

import { copy } from "./clipboard.js";
import { element } from "./format.js";
import { highlighted } from "./highlight.js";
import { iconButton } from "./icons.js";
import { inlines } from "./markdown_inline.js";
import { formulaBlock } from "./math.js";

/** Lists and quotes that go deeper are shown as they were written. */
const MAX_DEPTH = 6;

const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(\S.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DELIMITERS = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;

/** Draws a text in an element, and keeps the blocks that have not changed. */
export function renderMarkdown(container, text) {
  const drawn = container.drawn ?? [];
  const blocks = blocksOf(text.split("\n"));
  const first = blocks.findIndex((block, at) => block.source !== drawn[at]?.source || drawn[at].element.parentNode !== container);
  const numKept = first === -1 ? blocks.length : first;
  const kept = drawn.slice(0, numKept);
  const added = blocks.slice(numKept).map(({ source, make }) => ({ source, element: make() }));
  container.drawn = [...kept, ...added];
  if (added.length > 0 || drawn.length > numKept || container.childNodes.length !== numKept) {
    for (const node of [...container.childNodes].slice(numKept)) {
      node.remove();
    }
    container.append(...added.map((block) => block.element));
  }
}

/** The blocks of some lines as `{ source, make }`: elements are made only where the source is new. */
function blocksOf(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const read = [code, formulaBlock, heading, rule, quote, list, table, paragraph];
    const [end, make] = firstOf(read, (block) => block(lines, at, depth));
    // The kind of a block may depend on the line after it, so `source` includes this line.
    blocks.push({ source: lines.slice(at, end + 1).join("\n"), make });
    at = end;
  }
  return blocks;
}

const made = (lines, depth) => blocksOf(lines, depth).map(({ make }) => make());

function firstOf(list, attempt) {
  for (const item of list) {
    const result = attempt(item);
    if (result) {
      return result;
    }
  }
  return null;
}

function code(lines, at) {
  const [, indent, fence, info] = lines[at].match(FENCE) ?? [];
  if (!fence) {
    return null;
  }
  const isEnd = (line) => line.trim().length >= fence.length && line.trim() === fence[0].repeat(line.trim().length);
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) {
    end += 1;
  }
  const text = lines.slice(at + 1, end).map((line) => withoutIndent(line, indent.length)).join("\n");
  return [Math.min(end + 1, lines.length), () => codeBlock(text, info.trim().split(/\s/)[0])];
}

function codeBlock(text, language) {
  const pre = element("pre", { tabIndex: 0 }, element("code", {}, ...highlighted(text, language)));
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  const button = iconButton("copy", "Copy", () => copy(text, button));
  const head = element("div", { className: "code-head" }, element("span", { textContent: language }), button);
  return element("div", { className: "code" }, head, pre);
}

function heading(lines, at) {
  const [, signs, text] = lines[at].match(HEADING) ?? [];
  const shown = text?.trimEnd().replace(/ #+$/, "");
  // The page's own headings end at the third level, and levels must not be skipped.
  return signs ? [at + 1, () => element("h4", { className: `level-${signs.length}` }, ...inlines(shown))] : null;
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? [at + 1, () => element("hr")] : null;
}

function quote(lines, at, depth) {
  if (depth >= MAX_DEPTH || !QUOTE.test(lines[at])) {
    return null;
  }
  const end = endOf(lines, at, (line) => QUOTE.test(line));
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [end, () => element("blockquote", {}, ...made(inner, depth + 1))];
}

function list(lines, at, depth) {
  const first = lines[at].match(ITEM);
  if (depth >= MAX_DEPTH || !first) {
    return null;
  }
  const kind = kindOf(first);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const marker = lines[end].match(ITEM);
    if (!marker || kindOf(marker) !== kind || marker[1].length > first[1].length + 1) {
      break;
    }
    const [next, inner] = item(lines, end, marker);
    items.push(inner);
    end = next;
  }
  const isOrdered = kind !== "bullet";
  return [end, () => {
    const made = element(isOrdered ? "ol" : "ul", {}, ...items.map((inner) => listItem(inner, depth + 1)));
    if (isOrdered) {
      made.start = Number.parseInt(first[2], 10);
    }
    return made;
  }];
}

const kindOf = ([, , marker]) => (marker.length > 1 ? marker.at(-1) : "bullet");

/** The lines of an item without its indentation, and where the next one begins. */
function item(lines, at, [whole, { length: indent }]) {
  const inner = [lines[at].slice(whole.length)];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const isBlank = line.trim() === "";
    const isInner = !isBlank && indentOf(line) >= indent + 2;
    const wasBlank = inner.at(-1).trim() === "";
    if (!isBlank && !isInner && (wasBlank || beginsBlock(lines, end))) {
      break;
    }
    inner.push(isInner ? withoutIndent(line, whole.length) : line.trimStart());
  }
  // Blank lines at the end of a list do not belong to the list.
  const isLast = end === lines.length || !ITEM.test(lines[end]);
  while (isLast && end > at + 1 && lines[end - 1].trim() === "") {
    end -= 1;
  }
  return [end, inner];
}

function listItem(lines, depth) {
  const blocks = made(lines, depth);
  // An item of one paragraph needs no room around it.
  const [first, ...others] = blocks;
  const isPlain = first?.tagName === "P" && others.every(({ tagName }) => tagName === "UL" || tagName === "OL");
  return element("li", {}, ...(isPlain ? [...first.childNodes, ...others] : blocks));
}

function table(lines, at) {
  const delimiters = lines[at + 1]?.trim() ?? "";
  if (!lines[at].includes("|") || !delimiters.includes("|") || !DELIMITERS.test(delimiters)) {
    return null;
  }
  const sides = cellsOf(delimiters).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const end = endOf(lines, at + 2, (line) => line.includes("|"));
  const row = (line, tag) => {
    const cells = cellsOf(line);
    return element("tr", {}, ...sides.map((side, index) => element(tag, { className: side }, ...inlines(cells[index] ?? ""))));
  };
  return [end, () => {
    const head = element("thead", {}, row(lines[at], "th"));
    const body = element("tbody", {}, ...lines.slice(at + 2, end).map((line) => row(line, "td")));
    const box = element("div", { className: "table", tabIndex: 0 }, element("table", {}, head, body));
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Table");
    return box;
  }];
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** Reads at least one line, so that the parser always advances. */
function paragraph(lines, at) {
  const end = endOf(lines, at + 1, (line, index) => line.trim() !== "" && !beginsBlock(lines, index));
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return [end, () => element("p", {}, ...inlines(text))];
}

function beginsBlock(lines, at) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((begin) => begin.test(lines[at])) || formulaBlock(lines, at) !== null || table(lines, at) !== null;
}

function endOf(lines, at, isInside) {
  let end = at;
  while (end < lines.length && isInside(lines[end], end)) {
    end += 1;
  }
  return end;
}

const indentOf = (line) => line.length - line.trimStart().length;

const withoutIndent = (line, most) => line.slice(Math.min(indentOf(line), most));
