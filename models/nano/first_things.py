"""Asks a served corella-nano what people ask first, and counts refusals.

    python first_things.py --url http://127.0.0.1:8000              with 20 seeds each
    python first_things.py --list                                   what would be asked

The prompts are those of the README, of the book, of the page and of Python's documentation, drawn from their text, so
one that is added there later is asked as well; then FIRST, and the paraphrases of first_things.txt.
"""

import argparse
import json
import re
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DOCUMENTS = ["README.md", "docs/src/**/*.md", "crates/corella-server/page/*.js", "crates/corella-server/page/*.html",
             "crates/corella-python/README.md", "crates/corella-python/python/corella/*.py", "examples/**/*", "deploy/**/*"]
# Prompts of the book for something else than this model's own words.
ELSEWHERE = {
    "How many orders were placed in May?": "an adapter of another model",
    "What is the weather in Paris?": "has tools",
    "abc": "a model of the tests",
}
FIRST = {
    "story": ["Tell me a story.", "Tell me a story", "tell me a story", "Write a story"],
    "hello": ["hi", "Hi", "Hi!", "hello", "Hello", "Hello!", "hey"],
    "who": ["who are you", "Who are you?", "what are you?", "What is your name?"],
    "able": ["what can you do", "What can you do?", "help", "What can I ask you?"],
    "poem": ["write a poem", "Write a poem.", "Write me a poem about the sea."],
    "joke": ["Tell me a joke.", "tell me a joke"],
    "sum": ["2+2", "2 + 2", "what's 2 + 2?", "1+1", "What is 12 + 30?"],
    "language": ["Wer bist du?", "Was ist die Hauptstadt von Frankreich?", "Kannst du mir helfen?", "你是谁？", "你能做什么？", "今天天气怎么样？"],
    "": ["test", "How are you?", "why is the sky blue?"],
}
REFUSAL = re.compile(r"\b(sorry|cannot help|can't help|unable)\b", re.I)
LIMIT = 400


@dataclass(frozen=True)
class Case:
    where: str
    kind: str  # of the wanted answer; "" if any will do
    messages: tuple  # of (role, text); or a text to be continued

    @property
    def shown(self):
        return self.messages if isinstance(self.messages, str) else " / ".join(text for _, text in self.messages)


QUOTED = r'"((?:[^"\\]|\\.)*)"'
MESSAGE = re.compile(r'\{ ?"?role"?: "(system|user)", "?content"?: ' + QUOTED + r" ?\}")
unquoted = lambda text: json.loads(f'"{text}"')


def drawn_from(path):
    """The messages and texts that one document gives to a model."""
    text = path.read_text()
    system, answered = None, []
    for match in MESSAGE.finditer(text):
        said = (match[1], unquoted(match[2]))
        if match[1] == "system":
            system = (match.end(), said)
        else:
            near = [system[1]] if system and match.start() - system[0] < 8 else []
            yield (*near, said)
    for block in re.findall(r"^```console\n(.*?)^```", text, re.S | re.M):
        said = []
        for line in re.findall(r"^>>> (.+)$", block, re.M):
            if line.startswith("/system "):
                said = [("system", line.removeprefix("/system "))]
            elif line[0] not in '/"':
                yield (*said, ("user", line))
    for lines in re.findall(r'^>>> """\n((?:\.\.\. .*\n)+)', text, re.M):
        yield (("user", "\n".join(line[4:] for line in lines.splitlines()[:-1])),)
    for piped in re.findall(r"printf (?:'%s\\n' )?(.*?) \| (?:\w+=\S+ )*corella chat", text):
        turns = [turn.removesuffix("\\n") for turn in re.findall(r"'([^']*)'", piped)]
        yield tuple(("user", turn) for turn in turns if turn[0] != "/")
    for line in text.splitlines():
        if match := re.search(r"(?:generate|run) .*-p " + QUOTED, line):
            yield match[1] if "--raw" in line else (("user", match[1]),)
    for before, match in ((text[max(0, m.start() - 160):m.start()], m) for m in re.finditer(r'"(prompt|input)": ' + QUOTED, text)):
        path_of = re.findall(r"(?:8000|post\(\")/([\w/]+)", before)
        if path_of and path_of[-1] == "api/generate":
            yield (("user", match[2]),)
        elif path_of and path_of[-1] == "v1/responses":
            told = re.findall(r'"instructions": ' + QUOTED, before[-60:])
            turns = [] if "previous_response_id" in before[-80:] else [("system", x) for x in told]
            answered = [*(answered if "previous_response_id" in before[-80:] else turns), ("user", match[2])]
            yield tuple(answered)
        elif match[1] == "prompt" and path_of and path_of[-1] in ("v1/completions", "completion"):
            yield match[2]
    for listed in re.findall(r"const EXAMPLES = \[(.*?)\]", text, re.S):
        yield from ((("user", example),) for example in re.findall(QUOTED, listed))
    for texts in re.findall(r'llm\.generate\(\[?((?:"[^"]*"(?:, )?)+)', text):
        for each in re.findall(QUOTED, texts):
            yield (("user", each),) if path.name == "rust.md" else each


def drawn(root=ROOT):
    """Each prompt of the documents once, with the place where it is first met."""
    cases = {}
    for pattern in DOCUMENTS:
        for path in sorted(root.glob(pattern)):
            if not path.is_file() or path.suffix not in (".md", ".js", ".html", ".py", ".rs", ".sh", ".ipynb"):
                continue
            for said in drawn_from(path):
                text = said if isinstance(said, str) else said[-1][1]
                if text not in ELSEWHERE:
                    kind = "" if isinstance(said, str) else "story" if re.match(r"Tell me a story", text) else "sum" if " + " in text else ""
                    cases.setdefault(said, Case(str(path.relative_to(root)), kind, said))
    return list(cases.values())


def first():
    return [Case("first", kind, (("user", text),)) for kind, texts in FIRST.items() for text in texts]


def paraphrases():
    kind, cases = "", []
    for line in (HERE / "first_things.txt").read_text().splitlines():
        if line.startswith("# ") and line[2:].isalpha() and line[2:].islower():
            kind = line[2:]
        elif line and line[0] != "#":
            cases.append(Case("paraphrases", "story" if kind == "about" else kind, (("user", line),)))
    return cases


def sum_of(text):
    a, op, b = re.search(r"(\d+)\s*(\+|-|\*|x|plus|times)\s*(\d+)", text).groups()
    return {"+": int(a) + int(b), "-": int(a) - int(b)}.get(op.replace("plus", "+"), int(a) * int(b))


def is_kind(case, reply):
    """Whether the answer is one of the wanted kind, and where it is asked, says what it is."""
    presents = "Corella Nano" in reply and "language model" in reply
    if case.kind == "story":
        return len(re.findall(r"[.!?]\"?(?= |$)", reply)) >= 2 and not presents and "I can tell" not in reply
    if case.kind == "poem":
        return 2 <= reply.count("\n") + 1 <= 8
    if case.kind in ("who", "able"):
        return presents
    if case.kind == "sum":
        return re.search(rf"= {sum_of(case.messages[-1][1])}\b", reply) is not None
    if case.kind == "language":
        return "English" in reply or presents
    return bool(reply)


class Server:
    def __init__(self, url):
        self.url = url.rstrip("/")

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)["choices"][0]

    def reply(self, case, **sampling):
        """The answer to the last message, and whether it ended by itself. Messages before the last are asked, too."""
        if isinstance(case.messages, str):
            choice = self.post("/v1/completions", {"prompt": case.messages, "max_tokens": LIMIT, **sampling})
            return choice["text"], choice["finish_reason"] == "stop"
        said = []
        for role, text in case.messages:
            said.append({"role": role, "content": text})
            if role == "user":
                choice = self.post("/v1/chat/completions", {"messages": said, "max_tokens": LIMIT, **sampling})
                said.append(choice["message"])
        return choice["message"]["content"], choice["finish_reason"] == "stop"


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--url", default="http://127.0.0.1:8000")
    args.add_argument("--seeds", type=int, default=20, help="0 is one greedy answer")
    args.add_argument("--list", action="store_true")
    args.add_argument("--show", type=int, default=3, help="so many wrong answers to a prompt")
    args.add_argument("--out")
    args = args.parse_args()
    cases = drawn() + first() + paraphrases()
    if args.list:
        for case in cases:
            print(f"{case.where}\t{case.kind}\t{case.shown!r}")
        return
    server = Server(args.url)
    sampling = [{"seed": seed} for seed in range(args.seeds)] or [{"temperature": 0}]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda job: server.reply(job[0], **job[1]), [(case, each) for case in cases for each in sampling]))
    total, refused_prompts = {}, Counter()
    rows = []
    for i, case in enumerate(cases):
        mine = replies[i * len(sampling):(i + 1) * len(sampling)]
        group = case.where if case.where in ("first", "paraphrases") else "documents"
        bad = [r for r, ended in mine if REFUSAL.search(r) or not ended or not is_kind(case, r)]
        count = Counter(asked=len(mine), refused=sum(bool(REFUSAL.search(r)) for r, _ in mine), ended=sum(e for _, e in mine),
                        kind=sum(is_kind(case, r) for r, _ in mine))
        total.setdefault(group, Counter()).update(count)
        refused_prompts[group] += count["refused"] * 2 > len(mine)
        rows.append({"where": case.where, "kind": case.kind, "prompt": case.shown, **count, "replies": [r for r, _ in mine]})
        if bad:
            print(f"{case.where} [{case.kind}] {case.shown!r}: of {len(mine)} refused {count['refused']}, not ended {len(mine) - count['ended']}, "
                  f"of another kind {len(mine) - count['kind']}", file=sys.stderr)
            for r in sorted(set(bad), key=bad.count, reverse=True)[:args.show]:
                print(f"    {bad.count(r)} times {r[:150]!r}", file=sys.stderr)
    print("| | prompts | answers | refused | prompts refused by most seeds | ended | of the wanted kind |\n|---|---|---|---|---|---|---|")
    for group, c in total.items():
        n = sum(1 for case in cases if (case.where if case.where in ("first", "paraphrases") else "documents") == group)
        print(f"| {group} | {n} | {c['asked']} | {c['refused']} ({100 * c['refused'] / c['asked']:.1f} %) | {refused_prompts[group]} | "
              f"{100 * c['ended'] / c['asked']:.1f} % | {100 * c['kind'] / c['asked']:.1f} % |")
    if args.out:
        Path(args.out).write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
