"""Templates and the files that hold them: the many ways in which a thing can be said.

"[a|b|]" is a choice, "<slot>" a word that is put in later, "¶" a line break. Training draws from
wordings.txt and relations.txt, the held-out set from held_out.txt alone.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from words import made_up

HERE = Path(__file__).parent


@lru_cache(maxsize=None)
def _parse(text):
    """"a [b|c] <d>" as a list of strings, choices (lists) and slots (tuples of one)."""
    out = []
    for part in re.findall(r"\[[^\]]*\]|<\w+>|[^\[<]+|<", text):
        if part[0] == "[":
            out.append([_parse(option) for option in part[1:-1].split("|")])
        elif re.fullmatch(r"<\w+>", part):
            out.append((part[1:-1],))
        else:
            out.append(part)
    return out


def expand(rng, text, slots=None):
    def walk(parts):
        out = []
        for part in parts:
            if isinstance(part, str):
                out.append(part)
            elif isinstance(part, tuple):
                out.append(str(slots[part[0]]))
            else:
                out.append(walk(part[int(rng.random() * len(part))]))
        return "".join(out)

    text = re.sub(r" +", " ", walk(_parse(text))).replace(" .", ".").strip(" ")
    return re.sub(r"\b([Aa]) (?=[aeiou]|hour\b|honest\b)", r"\1n ", text)


def upper_first(text):
    return text[:1].upper() + text[1:]


@dataclass
class Ask:
    """What can be asked of a relation: the slot, the one form of the answer, and the questions."""

    slot: str
    answer: str
    direct: list = field(default_factory=list)
    indirect: list = field(default_factory=list)


@dataclass
class Relation:
    name: str
    slots: dict  # slot -> kind of word
    say: list = field(default_factory=list)
    asks: dict = field(default_factory=dict)  # slot -> Ask


def read(name):
    """The sections of one file: {"ADD": [template, ...]}, {"home": Relation}."""
    wordings, relations, into = {}, {}, None
    for line in (HERE / name).read_text().splitlines():
        mark, _, rest = line.partition(" ")
        head = re.fullmatch(r"# (\w+)((?: \w+=\w+)*)", line)
        if head and head[1].isupper():
            into = wordings[head[1]] = []
        elif head:
            slots = dict(s.split("=") for s in head[2].split())
            into = relations[head[1]] = Relation(head[1], slots)
        elif not line or mark == "#":
            continue
        elif isinstance(into, list):
            into.append(line.replace("¶", "\n"))
        elif mark == "+":
            into.say.append(rest)
        elif mark == "?":
            slot, _, answer = rest.partition(" : ")
            ask = into.asks[slot] = Ask(slot, answer)
        else:
            {"d": ask.direct, "i": ask.indirect}[mark].append(rest)
    return wordings, relations


TRAIN, RELATIONS = read("wordings.txt")
RELATIONS.update(read("relations.txt")[1])
HELD, RELATIONS_HELD = read("held_out.txt")

# Words that carry a task: a request without them would be another request.
TASK_WORDS = set("""json list array object story tale adventure fairy bedtime plus minus times sum add total together all more
    difference subtract take away from left remain less without remove deduct multiply multiplied product increase
    increased decrease result and or start starts begin begins first end ends finish finishes close last before after front
    behind beginning name called call who what where when which how many much not no keys key fields value number numbered
    he she it is of old text question my i me your you""".split())
# Common words that stand in for all the ones a stranger may use.
STRANGE = """absolutely accordingly actually afterwards allow anyway apparently appreciate approximately assemble assist attempt
    basically besides briefly broadly carefully catch certainly clarify clearly commonly communicate complete concerning confirm
    consider correctly craft currently declare deliver depict derive desire despite detail determine directly display
    distribute draft during elaborate emit ensure entirely especially establish examine expand extend faithfully fashion
    figure final finally following forth frankly furnish furthermore gather generally gladly grant handle hence however
    identify illustrate immediately indeed indicate inform inspect instead instruct intend issue jot jump kind lately lay lend
    literally maintain manage merely mostly namely neatly nevertheless notably obtain obviously occasionally offer once
    operate organise otherwise outline overall particularly perform perhaps plainly possibly practically precisely presumably
    proceed process promptly properly propose provide publish purely quickly quite rather reach really recently regarding
    regular relate release render report request respective respond retrieve reveal rightly roughly scan seek select seriously
    serve settle share simply sketch slightly sort specify spell stand straight submit such supply surely swiftly tackle tend
    thoroughly thus towards transform transmit truly try typically ultimately usual utterly various verify view whole willing
    wish within yield""".split()


def strange(rng, template):
    """Puts unknown words in the place of some that do not carry the task, so that one unknown word
    in a request does not turn a known task into an unknown one."""
    parts = re.split(r"(<[^>]*>|\[[^\[\]]*\]|[A-Za-z']+)", template)
    keep = TASK_WORDS - {"list", "array", "object"} if "JSON" in template else TASK_WORDS
    spots = [i for i, w in enumerate(parts) if w and w[0].isalpha() and w.lower() not in keep]
    for i in rng.sample(spots, min(len(spots), rng.choice((1, 1, 2)))):
        w = made_up(rng, False) if rng.random() < 0.5 else rng.choice(STRANGE)
        parts[i] = upper_first(w) if parts[i][0].isupper() else w
    return "".join(parts)


class Wording:
    """A section of wordings.txt, and the one of the same name in held_out.txt."""

    all = []

    def __init__(self, name):
        self.name, self.train, self.held = name, TRAIN[name], HELD.get(name, [])
        Wording.all.append(self)

    def pick(self, ctx):
        if ctx.new and self.held:
            return ctx.rng.choice(self.held)
        template = ctx.rng.choice(self.train)
        return strange(ctx.rng, template) if not ctx.held and "<" in template and ctx.chance(ctx.strangeness) else template

    def say(self, ctx, **slots):
        return expand(ctx.rng, self.pick(ctx), slots)

    def sentence(self, ctx, **slots):
        """With a capital, unless it starts with words to be copied: these must stay as they are."""
        template = self.pick(ctx)
        text = expand(ctx.rng, template, slots)
        return text if template.startswith("<") else upper_first(text)
