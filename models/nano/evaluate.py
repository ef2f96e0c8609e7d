"""Asks corella-nano the held-out dialogues and counts what it gets right.

    python evaluate.py --folder models/nano                 in PyTorch
    python evaluate.py --url http://127.0.0.1:8000          through a server that speaks OpenAI

Replies are greedy with at most 200 tokens. The seed names the set: 2024 is the published one,
any other gives dialogues from the same held-out words and wordings to work with.
"""

import argparse
import json
import re
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import corpus

LIMIT = 200
GOALS = {"stops": 98, "reading": 85, "sums": 85, "json": 85, "lists": 90, "story": 80}


def words_in(text):
    return " " + re.sub(r"[^\w']+", " ", text.lower()) + " "


def has(text, phrase):
    return words_in(phrase) in words_in(text).replace("'s ", " ")


def judge(check, reply):
    """Whether the reply does what was asked."""
    text = reply.strip()
    if "sum" in check:
        return bool(re.search(r"(?<!\d)" + re.escape(check["sum"]) + r"(?!\d)", text))
    if "json" in check:
        try:
            got = json.loads(text)
        except ValueError:
            return False
        return got == check["json"] and (not isinstance(got, dict) or list(got) == list(check["json"]))
    if "items" in check:
        items = [re.sub(r"^\d+\.\s*", "", line).strip() for line in text.splitlines()]
        return len(items) > 1 and len(set(items)) == len(items) and all(items)
    if "words" in check:
        return all(has(text, w) for w in check["words"])
    if "equals" in check:
        return text in check["equals"]
    return all(has(text, w) for w in check["has"]) and not any(has(text, w) for w in check["not"] if w not in check["has"])


def exact_list(check, reply):
    return reply.strip() == corpus.numbered(check["items"])


class Folder:
    name = "PyTorch"

    def __init__(self, folder):
        import torch
        from tokenizers import Tokenizer

        from model import load_folder

        self.torch = torch
        self.net = load_folder(folder)
        self.tok = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.ends = {self.tok.token_to_id("<|im_end|>"), self.tok.token_to_id("<|endoftext|>")}

    def reply(self, messages):
        torch = self.torch
        text = "".join(f"<|im_start|>{r}\n{t}<|im_end|>\n" for r, t in messages) + "<|im_start|>assistant\n"
        ids = self.tok.encode(text, add_special_tokens=False).ids
        past = [[] for _ in self.net.model.layers]
        out, start, feed = [], 0, ids
        with torch.inference_mode():
            while len(out) < LIMIT:
                x = self.net.hidden(torch.tensor([feed]), past, start)[:, -1]
                token = int((x @ self.net.model.embed_tokens.weight.T).argmax())
                if token in self.ends:
                    return self.tok.decode(out), True
                start += len(feed)
                feed = [token]
                out.append(token)
        return self.tok.decode(out), False

    def replies(self, prompts):
        return [self.reply(p) for p in prompts]


class Server:
    name = "server"

    def __init__(self, url):
        self.url = url.rstrip("/")
        with urllib.request.urlopen(self.url + "/v1/models") as r:
            self.model = json.load(r)["data"][0]["id"]

    def reply(self, messages):
        body = {"model": self.model, "messages": [{"role": r, "content": t} for r, t in messages],
                "temperature": 0, "max_tokens": LIMIT}
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as r:
            choice = json.load(r)["choices"][0]
        return choice["message"]["content"], choice["finish_reason"] == "stop"

    def replies(self, prompts):
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(self.reply, prompts))


def samples(rows):
    """The first two of every skill, so nobody picked them."""
    taken, out = Counter(), []
    for row in rows:
        taken[row["skill"]] += 1
        if taken[row["skill"]] <= 2:
            out.append(f"**{len(out) + 1}. {row['skill']}, {'right' if row['right'] else 'wrong'}**\n")
            for role, text in [*row["messages"], ["corella-nano", row["reply"]]]:
                quoted = text.replace("\n", "  \n> ")
                out[-1] += f"\n> *{role}:* {quoted}\n>"
            out[-1] = out[-1].rstrip("\n>") + "\n"
    return "\n".join(out)


def print_perplexity(folder):
    import math

    import train
    from model import load_folder

    net = load_folder(folder)
    for name, known in (("new words and wordings", False), ("new words in known wordings", True)):
        loss = train.held_out_loss(net, train.held_out_batches(known))
        print(f"{name}: loss {loss:.4f}, perplexity {math.exp(loss):.3f}")


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--folder")
    args.add_argument("--url")
    args.add_argument("--seed", type=int, default=2024)
    args.add_argument("--per-skill", type=int, default=60)
    args.add_argument("--known-wordings", action="store_true", help="only the words are new, the wordings are those of training")
    args.add_argument("--skills", default="")
    args.add_argument("--out")
    args.add_argument("--samples", help="write the first two dialogues of every skill as Markdown, right or wrong")
    args.add_argument("--perplexity", action="store_true", help="with --folder: of the wanted replies of other dialogues, and nothing else")
    args.add_argument("--failures", type=int, default=0, help="print so many failures of each skill")
    args = args.parse_args()
    if args.perplexity:
        return print_perplexity(args.folder or Path(__file__).parent)
    back = Server(args.url) if args.url else Folder(args.folder or Path(__file__).parent)
    dialogues = corpus.held_out(args.seed, args.per_skill, args.known_wordings)
    if args.skills:
        index = set(args.skills.split(","))
        names = [s for s in corpus.HELD_SKILLS for _ in range(args.per_skill)]
        dialogues = [d for d, n in zip(dialogues, names) if n in index]
    replies = back.replies([d.messages[:-1] for d in dialogues])
    right, seen, shown, rows, exact, stopped = Counter(), Counter(), Counter(), [], 0, 0
    for d, (reply, stop) in zip(dialogues, replies):
        ok = judge(d.check, reply)
        seen[d.skill] += 1
        right[d.skill] += ok
        stopped += stop
        exact += "items" in d.check and exact_list(d.check, reply)
        rows.append({"skill": d.skill, "messages": d.messages[:-1], "wanted": d.messages[-1][1], "reply": reply, "stopped": stop, "right": ok})
        if not ok and shown[d.skill] < args.failures:
            shown[d.skill] += 1
            print(f"[{d.skill}] {d.messages[:-1]}\n   wanted {d.messages[-1][1]!r}\n   got    {reply!r}", file=sys.stderr)
    both = seen["reading"] + seen["earlier"]
    table = {"stops": (stopped, len(dialogues)), "reading": (right["reading"] + right["earlier"], both),
             "sums": (right["sums"], seen["sums"]), "json": (right["json"], seen["json"]), "lists": (right["lists"], seen["lists"]),
             "story": (right["story"], seen["story"]), "reading: from a text": (right["reading"], seen["reading"]),
             "reading: from an earlier turn": (right["earlier"], seen["earlier"]), "lists: exactly right": (exact, seen["lists"]),
             **{s: (right[s], seen[s]) for s in ("facts", "talk", "refuse", "system")}}
    print(f"{back.name}, {len(dialogues)} held-out dialogues, seed {args.seed}\n\n| skill | right | of | share | goal |\n|---|---|---|---|---|")
    for name, (n, of) in table.items():
        if of:
            print(f"| {name} | {n} | {of} | {100 * n / of:.1f} % | {str(GOALS[name]) + ' %' if name in GOALS else ''} |")
    if args.samples:
        Path(args.samples).write_text(samples(rows))
    if args.out:
        Path(args.out).write_text(json.dumps({"back_end": back.name, "seed": args.seed, "dialogues": len(dialogues),
                                              "figures": {k: {"right": n, "of": of} for k, (n, of) in table.items() if of}, "replies": rows},
                                             indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
