// Colours of code: comments, strings, numbers, keywords, names of types and functions.
//
// A language is described by its comments, quotes and keywords. Code in an unknown language, or very long code, stays
// plain.

import { element } from "./format.js";

const MAX_LENGTH = 50_000;

const C_COMMENT = String.raw`\/\/.*|\/\*[\s\S]*?(?:\*\/|(?![\s\S]))`;
const HASH_COMMENT = String.raw`#.*`;
const DASH_COMMENT = String.raw`--.*`;
const DOUBLE = String.raw`"(?:\\[\s\S]|[^"\\\n])*"?`;
const SINGLE = String.raw`'(?:\\[\s\S]|[^'\\\n])*'?`;
const BACKTICK = "`(?:\\\\[\\s\\S]|[^`\\\\])*`?";
const CHARACTER = String.raw`'(?:\\[^\n']{1,9}|[^'\\\n])'`;
const TRIPLE = String.raw`[rRbBfFuU]{0,2}(?:"""[\s\S]*?(?:"""|(?![\s\S]))|'''[\s\S]*?(?:'''|(?![\s\S])))`;
const TAG = String.raw`<\/?[A-Za-z][\w:.-]*|\/?>`;

const words = (text) => new Set(text.split(" "));

const C_WORDS = "break case char const continue default do double else enum extern float for goto if int long return short signed sizeof static struct switch typedef union unsigned void volatile while bool true false NULL";
const JS_WORDS = "async await break case catch class const continue debugger default delete do else export extends finally for from function get if import in instanceof let new null of return set static super switch this throw try typeof undefined var void while with yield true false";
const C = { comment: C_COMMENT, string: `${DOUBLE}|${CHARACTER}`, words: words(C_WORDS) };
const CPP = { ...C, words: words(`${C_WORDS} auto catch class constexpr delete explicit final friend inline mutable namespace new noexcept nullptr operator override private protected public template this throw try typename using virtual`) };
const JS = { comment: C_COMMENT, string: `${DOUBLE}|${SINGLE}|${BACKTICK}`, words: words(JS_WORDS) };
const TS = { ...JS, words: words(`${JS_WORDS} abstract any as boolean declare enum implements interface is keyof namespace never number private protected public readonly string type unknown`) };
const JAVA = { ...C, words: words("abstract assert boolean break byte case catch char class const continue default do double else enum extends final finally float for if implements import instanceof int interface long native new null package private protected public record return short static super switch synchronized this throw throws transient try var void volatile while yield true false") };
const CSHARP = { ...C, words: words("abstract as async await base bool break byte case catch char class const continue decimal default delegate do double else enum event explicit extern false finally fixed float for foreach get if implicit in int interface internal is lock long namespace new null object operator out override params private protected public readonly record ref return sbyte sealed set short static string struct switch this throw true try typeof uint ulong using var virtual void while yield") };
const KOTLIN = { ...C, words: words("abstract as break by catch class companion const continue data do else enum extends false final finally for fun if implements import in interface internal is lateinit match null object open override package private protected public return sealed super suspend this throw trait true try typealias val var when while with yield def") };
const SWIFT = { ...C, string: DOUBLE, words: words("as async await break case catch class continue default defer do else enum extension false fileprivate for func guard if import in init inout internal is let nil open override private protocol public repeat return self static struct super switch throw throws true try typealias var where while") };
const GO = { ...C, string: `${DOUBLE}|${CHARACTER}|${BACKTICK}`, words: words("break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var true false nil iota bool byte error float32 float64 int int64 rune string uint") };
const RUST = { ...C, words: words("as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while bool char f32 f64 i8 i16 i32 i64 isize str u8 u16 u32 u64 usize") };
const PHP = { comment: `${C_COMMENT}|${HASH_COMMENT}`, string: `${DOUBLE}|${SINGLE}`, words: words(`${JS_WORDS} abstract array as echo elseif empty endforeach endif fn foreach global implements interface isset namespace print private protected public require trait use`) };
const PYTHON = { comment: HASH_COMMENT, string: `${TRIPLE}|[rRbBfFuU]{0,2}(?:${DOUBLE}|${SINGLE})`, words: words("False None True and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return self try while with yield") };
const RUBY = { comment: HASH_COMMENT, string: `${DOUBLE}|${SINGLE}`, words: words("alias and begin break case class def do else elsif end ensure false for if in module next nil not or raise redo require rescue retry return self super then true unless until when while yield function local use my sub foreach repeat") };
const SHELL = { comment: String.raw`(?<![^\s;])#.*`, string: `${DOUBLE}|'[^']*'?`, words: words("case do done elif else esac export fi for function if in local return set source then until while cd echo exit sudo") };
const SQL = { comment: `${DASH_COMMENT}|${C_COMMENT}`, string: `${SINGLE}|${DOUBLE}`, ignoresCase: true, words: words("add all alter and as asc begin between by case commit constraint create cross default delete desc distinct drop else end exists false foreign from full group having in index inner insert into is join key left like limit not null on or order outer primary references returning right rollback select set table then true union unique update using values view when where with integer text varchar boolean timestamp") };
const LUA = { comment: String.raw`--\[\[[\s\S]*?(?:\]\]|(?![\s\S]))|--.*`, string: `${DOUBLE}|${SINGLE}`, words: words("and break do else elseif end false for function goto if in local nil not or repeat return then true until while") };
const HASKELL = { comment: `${DASH_COMMENT}|${String.raw`\{-[\s\S]*?(?:-\}|(?![\s\S]))`}`, string: `${DOUBLE}|${CHARACTER}`, words: words("case class data default deriving do else if import in infix instance let module newtype of then type where") };
const JSON_LIKE = { comment: C_COMMENT, string: DOUBLE, words: words("true false null") };
const KEYED = { comment: String.raw`(?<![^\s])[#;].*`, string: `${DOUBLE}|'[^'\n]*'?`, words: words("true false null yes no on off") };
const CSS = { comment: String.raw`\/\*[\s\S]*?(?:\*\/|(?![\s\S]))`, string: `${DOUBLE}|${SINGLE}`, words: words("important media import supports keyframes layer") };
const MARKUP = { comment: String.raw`<!--[\s\S]*?(?:-->|(?![\s\S]))`, string: `${DOUBLE}|${SINGLE}`, keyword: TAG, words: words("") };
const DIFF = { comment: String.raw`^@@.*`, string: String.raw`^\+.*`, keyword: String.raw`^-.*`, words: words("") };

const LANGUAGES = new Map(
  [
    [C, "c h"], [CPP, "cpp c++ cc cxx hpp cuda cu arduino objective-c"], [JS, "js javascript jsx mjs node"], [TS, "ts typescript tsx"],
    [JAVA, "java"], [CSHARP, "cs csharp c#"], [KOTLIN, "kotlin kt scala dart groovy"], [SWIFT, "swift"], [GO, "go golang zig"],
    [RUST, "rust rs"], [PHP, "php"], [PYTHON, "python py python3 mojo"], [RUBY, "ruby rb perl r julia elixir"],
    [SHELL, "sh bash shell zsh fish console terminal dockerfile makefile"], [SQL, "sql mysql postgresql sqlite"], [LUA, "lua"],
    [HASKELL, "haskell hs elm"], [JSON_LIKE, "json jsonc json5"], [KEYED, "yaml yml toml ini conf properties"],
    [CSS, "css scss less"], [MARKUP, "html xml svg vue"], [DIFF, "diff patch"],
  ].flatMap(([language, names]) => names.split(" ").map((name) => [name, language])),
);

/** The nodes of some code. */
export function highlighted(text, name) {
  const language = LANGUAGES.get(name.toLowerCase());
  if (!language || text.length > MAX_LENGTH) {
    return [text];
  }
  const nodes = [];
  let plain = "";
  for (const token of text.matchAll(pattern(language))) {
    const kind = kindOf(token, language, text);
    if (kind) {
      nodes.push(plain, element("span", { className: `code-${kind}`, textContent: token[0] }));
      plain = "";
    } else {
      plain += token[0];
    }
  }
  nodes.push(plain);
  return nodes.filter((node) => node !== "");
}

/** Every character is part of one token, so that none is lost. */
function pattern(language) {
  const { comment, string, keyword = "(?!)" } = language;
  const parts = [
    `(?<comment>${comment})`,
    `(?<string>${string})`,
    `(?<keyword>${keyword})`,
    String.raw`(?<number>\b\d(?:[\w.]*\w)?)`,
    String.raw`(?<word>[\p{L}_$][\p{L}\p{N}_$]*)`,
    String.raw`\s+`,
    String.raw`[\s\S]`,
  ];
  language.pattern ??= new RegExp(parts.join("|"), "gmu");
  return language.pattern;
}

function kindOf({ 0: token, groups, index }, language, text) {
  if (groups.word === undefined) {
    return ["comment", "string", "keyword", "number"].find((kind) => groups[kind] !== undefined);
  }
  if (language.words.has(language.ignoresCase ? token.toLowerCase() : token)) {
    return "keyword";
  }
  const [next, afterNext] = text.slice(index + token.length, index + token.length + 2);
  const isMacro = language === RUST && next === "!" && afterNext !== "=";
  if (next === "(" || isMacro) {
    return "function";
  }
  return /^\p{Lu}.*\p{Ll}/u.test(token) && language !== MARKUP ? "type" : undefined;
}
