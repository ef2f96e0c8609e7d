"""Writes the corpus of corella-nano: a seed goes in, dialogues come out.

A model of 3.9 M parameters cannot know much, so it must learn to read and to copy. Three
rules follow. Wordings are products of independent parts, so that no sentence is met often
enough to be learnt as a whole. A third of all copied words are made up, so that copying is
the only way to be right. And the held-out set has its own words, wordings and statements
(`held=True`), so that its figures say what a stranger will see.
"""

import json
import random
import re
from dataclasses import dataclass, field

from wordings import HELD, HERE, RELATIONS, RELATIONS_HELD, STRANGE, TRAIN, Wording, expand, strange, upper_first
from words import LISTS, is_held_word, made_up

MIX = {"story": 14, "reading": 33, "json": 25, "sums": 10, "talk": 10, "lists": 4, "facts": 4}
# The last part turns to what is learnt last, finding the right fact of a text, with more questions to a text.
LAST_MIX = {"story": 12, "reading": 42, "json": 19, "sums": 11, "talk": 11, "lists": 3, "facts": 2}
LAST = False
# From then on every second word is one that training has not met, or hardly: a passage is to be read by its spelling.
FRESH_MIX = {"story": 10, "reading": 48, "json": 19, "sums": 10, "talk": 9, "lists": 2, "facts": 2}
FRESH = False
# At the end come the first things that people type, which are short and name nothing to copy.
FIRST_SHARE = 0.0
# At the very end, so many times more unknown words stand in requests and statements.
STRANGER = 1


@dataclass
class Dialogue:
    skill: str
    messages: list  # of (role, text); the last one is the assistant's
    check: dict = field(default_factory=dict)  # how evaluate.py judges the last reply
    graded: bool = True


# ---------------------------------------------------------------- words

# The share of words of a kind that are made up, and not spelled like any other.
MORE = {"place": 0.25, "object": 0.2, "animal": 0.2, "food": 0.15, "job": 0.2, "colour": 0.15, "hobby": 0.15, "instrument": 0.15, "spot": 0.2,
        "material": 0.15, "vehicle": 0.15, "weather": 0.15, "shop": 0.15, "subject": 0.15, "drink": 0.1, "trait": 0.15, "relative": 0.1,
        "thingname": 0.15}
# Later in training, plan.json says from which step on, so many are two words: these are copied by halves.
PHRASES = False
PHRASE_SHARE = {"place": 0.15, "event": 0.2, "object": 0.08, "food": 0.05, "animal": 0.06, "job": 0.08, "material": 0.06, "instrument": 0.06,
                "shop": 0.15, "madeval": 0.12, "madekey": 0.05, "vehicle": 0.06, "hobby": 0.06, "thingname": 0.08, "drink": 0.05}
SPOTS = ["in", "on", "under", "behind", "near", "beside", "inside", "by", "below", "above", "next to", "in front of", "on top of", "close to"]
FRESH_KINDS = set("""place object animal food job colour hobby instrument spot material vehicle weather shop subject drink trait relative
    thingname secret name town event""".split())
PLAIN_WORDS = sorted({part.lower() for train, _ in LISTS.values() for w in train for part in w.split() if len(part) > 3} | set(STRANGE))


def read_words(name):
    """The words of a file, but for those of which a part is kept for the held-out set."""
    kept = {part.lower() for _, held in LISTS.values() for w in held for part in w.split()}
    words = [w for line in (HERE / name).read_text().splitlines() if line[:1] != "#" for w in line.split()]
    return [w.replace("_", " ") for w in words if kept.isdisjoint(w.lower().split("_"))]


RARE_WORDS, RARE_NAMES = read_words("plain_words.txt"), read_words("plain_names.txt")


def spliced(rng):
    """A made-up word that is spelled like English: the head of one word and the tail of another."""
    while True:
        a, b = rng.choice(PLAIN_WORDS), rng.choice(PLAIN_WORDS)
        w = a[:rng.randint(2, max(2, len(a) - 1))] + b[rng.randint(1, max(1, len(b) - 2)):]
        if 4 <= len(w) <= 11 and w.isalpha() and w not in PLAIN_WORDS and not is_held_word(w):
            return w


class Context:
    def __init__(self, rng, held=False, known_wordings=False):
        self.rng, self.held = rng, held  # held: words that training never saw ...
        self.new = held and not known_wordings  # ... and wordings, unless only words shall be new
        self.strangeness = 0.12 * STRANGER
        self.plain = False  # only words of the lists
        self.used = set()

    def chance(self, p):
        return self.rng.random() < p

    def word(self, kind):
        """A word of a kind that this dialogue has not used yet."""
        for _ in range(50):
            w = self._word(kind)
            if w.lower() not in self.used:
                break
        self.used.add(w.lower())
        return w

    def listed(self, kind):
        train, held = LISTS[kind]
        return self.rng.choice(held if self.held and held else train)

    def phrase(self):
        """Two words for one thing, each made up or not."""
        word = lambda: self.invented() if self.chance(0.4) else self.rng.choice(PLAIN_WORDS)
        return f"{word()} {word()}"

    def invented(self, capital=False):
        w = spliced(self.rng) if not self.held and self.chance(0.5) else made_up(self.rng, self.held)
        return upper_first(w) if capital else w

    def fresh(self, kind):
        """A word that is spelled as no other of its kind: made up, or one of thousands."""
        rng = self.rng
        if kind in ("name", "town"):
            return rng.choice(RARE_NAMES) if self.chance(0.3) else self.invented(True)
        w = rng.choice(RARE_WORDS) if self.chance(0.35) else self.invented()
        if self.chance(1.5 * PHRASE_SHARE.get(kind, 0.03)):
            other = rng.choice(RARE_WORDS + PLAIN_WORDS) if self.chance(0.5) else self.invented()
            w = f"{w} {other}" if self.chance(0.5) else f"{other} {w}"
        if kind == "food":
            return w + "s" if w[-1] not in "sxzh" and self.chance(0.6) else w
        if kind == "spot":
            where = self.invented() if self.chance(0.2) else rng.choice(SPOTS)
            return f"{where} the {w}"
        if kind == "shop":
            return w + rng.choice([" shop", " shop", " store", " market", " stall", " house", "", ""])
        return w

    def _word(self, kind):
        rng = self.rng
        if self.plain:
            return self.listed(kind)
        if FRESH and not self.held and kind in FRESH_KINDS and self.chance(0.5):
            return self.fresh(kind)
        if PHRASES and not self.held and self.chance(PHRASE_SHARE.get(kind, 0.0)):
            return self.phrase()
        if kind == "age":
            return str(rng.randint(3, 99))
        if kind == "count":
            return str(rng.randint(2, 30))
        if kind == "price":
            return str(rng.randint(2, 99))
        if kind == "hour":
            return rng.choice([f"{rng.randint(5, 12)} o'clock", f"{rng.randint(5, 12)}:{rng.choice(['15', '30', '45', '00'])}",
                               f"{rng.randint(5, 12)} in the morning"])
        if kind == "event":
            if not self.held and self.chance(0.25):
                return self.invented()
            return rng.choice(EVENTS_HELD if self.held else EVENTS)
        if kind == "title":
            return self.listed("name") if self.chance(0.25) else self.invented(True)
        if kind == "code":
            r = rng.random()
            if r < 0.25:
                return "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 5)))
            return self.listed("object") if r < 0.4 else self.invented(self.chance(0.3))
        if kind == "madekey":
            return self.invented() if self.chance(0.7) else self.listed("object")
        if kind == "madeval":
            return self.invented(self.chance(0.3)) if self.chance(0.7) else self.listed("colour")
        if not self.held and rng.random() < MORE.get(kind, 0.0):
            w = self.invented(kind in ("name", "town"))
            return {"food": w + "s" if w[-1] not in "sxzh" else w, "spot": f"{rng.choice(SPOTS)} the {w}", "shop": f"{w} shop"}.get(kind, w)
        share = {"name": 0.35, "town": 0.45, "place": 0.1, "object": 0.25, "animal": 0.12, "food": 0.12, "job": 0.1,
                 "colour": 0.06, "hobby": 0.06, "instrument": 0.12, "material": 0.08, "subject": 0.15, "drink": 0.12}
        if rng.random() < share.get(kind, 0.0):
            w = self.invented(kind in ("name", "town"))
            return w + "s" if kind == "food" and w[-1] not in "sxzh" else w
        return self.listed(kind)


EVENTS = """party market concert race school play flower show football match picnic dance test meeting wedding
parade book club chess game fair festival""".replace("school play", "school_play").replace("flower show", "flower_show") \
    .replace("football match", "football_match").replace("book club", "book_club").replace("chess game", "chess_game").split()
EVENTS = [e.replace("_", " ") for e in EVENTS]
EVENTS_HELD = ["regatta", "auction", "recital", "lantern walk", "bake sale", "tournament"]

# ---------------------------------------------------------------- how people ask

ASK_DIRECT = Wording("ASK_DIRECT")
ASK_INDIRECT = Wording("ASK_INDIRECT")


def ragged(ctx, text):
    """Half the world types without capitals and full stops."""
    if ctx.chance(0.12):
        text = text[:1].lower() + text[1:]
    if ctx.chance(0.1) and text[-1:] in ".?!":
        text = text[:-1]
    return text


def question(ctx, ask, slots):
    rng = ctx.rng
    odd = lambda template: strange(rng, template) if not ctx.held and "<" in template and ctx.chance(0.08 * STRANGER) else template
    if ask.indirect and (not ask.direct or ctx.chance(0.45)):
        return ragged(ctx, upper_first(ASK_INDIRECT.say(ctx, q=expand(rng, odd(rng.choice(ask.indirect)), slots))))
    text = expand(rng, odd(rng.choice(ask.direct)), slots)
    if not ctx.held and ctx.chance(0.05):  # people leave out the small words
        text = re.sub(r"^(what|which|who|where|how|when) (is|are|was|does|did|do) |\b(the|a) ", "", text, count=2)
    if ctx.chance(0.4):
        return ragged(ctx, upper_first(text) + "?")
    frame = ASK_DIRECT.pick(ctx)
    text = upper_first(text) if frame.startswith("<q>") or (": <q>" in frame and ctx.chance(0.5)) else text
    return ragged(ctx, upper_first(expand(rng, frame, {"q": text})))


# ---------------------------------------------------------------- reading

def fill(ctx, relation):
    return {slot: ctx.word(kind) for slot, kind in relation.slots.items()}


STATE = Wording("STATE")  # what can stand before any statement


def state(ctx, relation, slots):
    if ctx.new:
        line = ctx.rng.choice(RELATIONS_HELD[relation.name].say)
    else:
        line = ctx.rng.choice(relation.say)
        if not ctx.held and ctx.chance(0.12 * STRANGER):
            line = strange(ctx.rng, line)
    text = expand(ctx.rng, line, slots)
    if FRESH and not ctx.held and ctx.chance(0.12):
        return upper_first(STATE.say(ctx, s=text if line.startswith(("<", "I ", '"')) else text[:1].lower() + text[1:]))
    return upper_first(text)


def ask_about(ctx, relation, slots):
    """A question, its answer, the slot that was asked for."""
    asks = RELATIONS_HELD[relation.name].asks if ctx.new else relation.asks
    slot = ctx.rng.choice(list(asks))
    return question(ctx, asks[slot], slots), upper_first(expand(ctx.rng, relation.asks[slot].answer, slots)), slot


THIRD = [r for r in RELATIONS.values() if r.say and not r.name.startswith("me_")]
FIRST = [r for r in RELATIONS.values() if r.name.startswith("me_")]


def known(ctx, relations):
    """Those that can be spoken of in the wordings of the context."""
    return [r for r in relations if r.name in RELATIONS_HELD] if ctx.new else relations


FILLER = Wording("FILLER")
TEXT_FIRST = Wording("TEXT_FIRST")
TEXT_LAST = Wording("TEXT_LAST")
UNKNOWN = "The text does not say that."


def passage(ctx):
    """Some facts of which several are of the same kind, so that only binding the right words helps."""
    rng = ctx.rng
    n = rng.choice((1, 2, 2, 3, 3, 4, 5) if ctx.held else (1, 2, 3, 3, 4, 4, 5, 6))
    same = 0.6 if FRESH and not ctx.held else 0.45
    key = rng.choice(known(ctx, THIRD))
    facts = [(key, fill(ctx, key))]
    while len(facts) < n:
        r = key if ctx.chance(same) else rng.choice(known(ctx, THIRD))
        slots = fill(ctx, r)
        if r is not key and ctx.chance(0.3):  # the same person does two things
            people = [s[k] for q, s in facts for k, kind in q.slots.items() if kind == "name"]
            mine = [k for k, kind in r.slots.items() if kind == "name"]
            if people and mine and not any(q is r for q, _ in facts):
                slots[mine[0]] = rng.choice(people)
        facts.append((r, slots))
    rng.shuffle(facts)
    sentences = [state(ctx, r, s) for r, s in facts]
    if ctx.chance(0.2):
        sentences.insert(rng.randint(0, len(sentences)), FILLER.say(ctx))
    return facts, ("\n" if FRESH and not ctx.held and ctx.chance(0.08) else " ").join(sentences)


def label(ctx):
    """A word that stands over a text and says nothing."""
    return "" if ctx.new else upper_first(ctx.rng.choice(RARE_WORDS)) if ctx.chance(0.6) else ctx.invented(True)


def unambiguous(fact, asked, facts):
    """Whether the words of the question (all slots but the asked one) point at one fact only."""
    r, slots = fact
    for other, s in facts:
        if s is slots:
            continue
        values = {v.lower() for v in s.values()}
        if any(v.lower() in values for k, v in slots.items() if k != asked) and r.slots.keys() & other.slots.keys():
            if other is r:
                return False
    return True


def reading(ctx):
    rng = ctx.rng
    if ctx.chance(0.3):
        return earlier_turn(ctx)
    if ctx.chance(0.12):
        return story_reading(ctx)
    facts, text = passage(ctx)
    order = facts * 2 if FRESH and not ctx.held else list(facts)
    rng.shuffle(order)
    messages = []
    turns = 1 if ctx.held else rng.choice((1, 2, 3, 4, 6, 8) if FRESH else (1, 2, 3, 4, 5, 6) if LAST else (1, 1, 2, 3, 4, 5))
    check = {}
    for i in range(min(turns, len(order))):
        r, slots = order[i]
        q, a, asked = ask_about(ctx, r, slots)
        if not unambiguous((r, slots), asked, facts):
            continue
        if not messages:
            if not ctx.held and ctx.chance(0.04):
                absent = rng.choice([x for x in THIRD if x.slots.get("p") == "name" and all(x is not y for y, _ in facts)])
                q = ask_about(ctx, absent, fill(ctx, absent))[0]
                a = UNKNOWN
            frame = TEXT_LAST if ctx.chance(0.15) else TEXT_FIRST
            messages += [("user", frame.say(ctx, t=text, q=q, w=label(ctx))), ("assistant", a)]
        else:
            messages += [("user", q), ("assistant", a)]
        others = [v for f, s in facts for k, v in s.items() if s is not slots and f.slots[k] == r.slots[asked] and v not in slots.values()]
        check = {"has": [slots[asked]], "not": others}
    if not messages:
        return reading(ctx)
    return Dialogue("reading", messages, check)


REMEMBER = Wording("REMEMBER")
ME_INTRO = Wording("ME_INTRO")
NOTED = ["I will remember that.", "OK, I will remember that.", "Good to know.", "Thank you for telling me.", "All right."]
BETWEEN = ["talk", "sums", "facts", "lists"]


def earlier_turn(ctx):
    """A fact told in one turn and asked for in a later one."""
    rng = ctx.rng
    pool = FIRST if ctx.chance(0.65) else THIRD
    n = rng.choice((1, 1, 2, 3)) if pool is FIRST else rng.choice((1, 1, 2))
    chosen = rng.sample(known(ctx, pool), n)
    clash = {"me_hobby": "me_food", "me_put": "me_item"}
    chosen = [r for r in chosen if not any(clash.get(r.name) == x.name for x in chosen)]
    facts = [(r, fill(ctx, r)) for r in chosen]
    text = " ".join(state(ctx, r, s) for r, s in facts)
    frame = ME_INTRO if pool is FIRST else REMEMBER
    said = ragged(ctx, frame.say(ctx, s=text))
    name = next((s["n"] for r, s in facts if r.name == "me_name"), None)
    noted = f"Nice to meet you, {name}!" if name else rng.choice(NOTED)
    messages = [("user", upper_first(said)), ("assistant", noted)]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        other = {"talk": talk_turn, "sums": sums_turn, "facts": facts_turn, "lists": lists_turn}[rng.choice(BETWEEN)]
        messages += other(ctx)[0]
    check = {}
    for r, slots in rng.sample(facts, 1 if ctx.held else rng.randint(1, len(facts))):
        q, a, asked = ask_about(ctx, r, slots)
        messages += [("user", q), ("assistant", a)]
        check = {"has": [slots[asked]], "not": []}
    return Dialogue("earlier", messages, check)


# ---------------------------------------------------------------- stories

KIND = ["girl", "boy", "fox", "bear", "cat", "dog", "rabbit", "mouse", "owl", "frog", "dragon", "robot", "king", "queen",
        "farmer", "sailor", "baker", "prince", "princess", "giant", "pirate", "wizard", "hedgehog", "penguin", "lion",
        "elephant", "child", "knight", "turtle", "squirrel", "monkey", "duck", "horse", "bird"]
KIND_HELD = ["llama", "falcon", "blacksmith", "astronaut", "walrus", "otter", "shepherdess", "gnome"]
SHE = {"girl", "queen", "princess", "hen", "shepherdess"}
HE = {"boy", "king", "prince", "knight"}

OPENING = """
[Once upon a time|One day|Long ago|Once], there [was|lived] a <tr> <k> [called|named] <h> in a <l>.
[Once upon a time|Long ago], a <tr> <k> [called|named] <h> lived [near|in] a <l>.
<h> was a <tr> <k> who lived [in|near|close to] a <l>.
In a <l>, there lived a <tr> <k> [called|named] <h>.
[One morning|One day|Early one morning|On a sunny day], a <tr> <k> named <h> [walked|came|went] to the <l>.
There was once a <tr> <k>. [Her|His] name was <h>, and [she|he] lived in a <l>.
<h> was a <k>, and a very <tr> one. [She|He] lived near a <l>.
""".strip().splitlines()
SECOND = """
Every day, [she|he] [walked around|looked at the sky|sang a song|dreamed of a big adventure|helped the neighbours].
[She|He] [loved|liked] to [sing|dance|play outside|look at the stars|listen to the wind|tell stories].
[Everyone|The whole place] [liked|knew] <h>, because [she|he] was so [friendly|funny|helpful|kind].
But <h> was [bored|sad|a little lonely|hungry|curious] that day.
It was a [warm|cold|windy|bright|quiet] [morning|day|evening], and the [birds|bees|children] were [singing|busy|awake].
<h> wanted to [find a friend|see the world|learn something new|help somebody|have some fun].
""".strip().splitlines()
THING_FIRST = """
[On the way|Near the path|Under a tree|Behind a stone|In the grass], [she|he] [found|saw|discovered|noticed] a <o>.
One day, <h> [found|saw|lost] a <o> [near the <l>|in the <l>|on the ground|by the road].
[Suddenly|Then], <h> saw a <o> [lying on the ground|in the grass|between two stones|next to the path].
<h> [took|packed|carried] a <o> and [went out|walked into the <l>|started to walk|began a journey].
<h> had [a secret|one treasure|a dream]: a <o>.
In the [morning|evening], <h> [made|bought|borrowed|cleaned] a <o>.
""".strip().splitlines()
THING_NEXT = """
[Next to it|Behind it|Not far away|A little later|By the road|Under a bush], there was a <o>.
Then [she|he] [found|saw|picked up|noticed|bought|made] a <o>[ too|, and it was beautiful|, which was very old|].
[A friend|An old woman|A little bird|A stranger|The wind|A kind neighbour|An old man|A child] [gave|brought|showed] [her|him] a <o>.
"[What a nice|What a strange|Look, a|Oh, a|I always wanted a] <o>!" [said|cried|thought] <h>.
Soon [she|he] [came to|met somebody with|fell over|heard about|dreamed of] a <o>.
There was also a <o>, and <h> [laughed|smiled|was surprised|wondered why].
[In a box|In a bag|Behind a door|Under the bed|Next to a well|In an old chest] [she|he] [found|discovered|saw] a <o>.
[She|He] [needed|looked for|wished for] a <o>, and [soon|at last|by luck] [she|he] found one.
""".strip().splitlines()
THING_USE = """
With the <o>, [she|he] [felt safe|felt brave|could go on|was not afraid|had an idea].
"[I can use|I need|I like|Nobody may take] [this|the] <o>," [thought|said] <h>.
But [the wind|a big bird|a thief|the rain|a wave] took the <o> away, and <h> [ran after it|had to look for it|was sad].
[She|He] [hid|put|kept] the <o> [in a bag|under a stone|in a safe place|close to the heart].
<h> used the <o> to [open a door|cross the water|help a friend|build a small house|make a fire|find the way].
[She|He] [gave|showed|lent] the <o> to <f>[ the <k2>|], and they became friends.
The <o> was [magic|broken|warm|heavy|very old|the best of all], [but|and] <h> [liked it|smiled|took it home].
""".strip().splitlines()
MIDDLE = """
[Then|Suddenly|After a while], it began to [rain|snow|get dark].
[Her|His] friend <f>[ the <k2>|] [came to help|laughed loudly|knew what to do|was waiting there].
<h> [was afraid|was tired|was surprised] at first, but [she|he] did not give up.
"[Do not worry|Come with me|Let us try again]," said <f>[ the <k2>|].
They [talked|walked|worked|played] together [all day|for a long time|until the sun went down].
[She|He] [thought and thought|looked everywhere|asked everyone|tried again and again].
A [small|big|strange] <k2> [asked for help|sat by the road|looked at <h>|said hello].
""".strip().splitlines()
ENDING = """
[In the end|At last|Finally], <h> [went home|came home|ran home] and was [very happy|tired but happy|proud|glad].
From that day on, <h> was never [sad|lonely|afraid|bored] again.
[That night|In the evening], <h> [slept well|fell asleep with a smile|told everyone the story|dreamed of the <l>].
[Everyone|All the friends] [clapped|cheered|laughed|danced], and <h> smiled.
And <h> [learned|knew] that [it is good to share|friends are the best treasure|a kind heart helps|it is good to be brave|small things can be great].
And they all lived happily ever after.
""".strip().splitlines()

STORY_FRAME = Wording("STORY_FRAME")
STORY_HERO = Wording("STORY_HERO")
STORY_HERO_NP = Wording("STORY_HERO_NP")
STORY_PLACE = Wording("STORY_PLACE")
STORY_WORDS = Wording("STORY_WORDS")
STORY_ASIDE = Wording("STORY_ASIDE")


def joined(ctx, items):
    if len(items) == 1:
        return items[0]
    if ctx.chance(0.15):
        return ", ".join(items)
    return ", ".join(items[:-1]) + ctx.rng.choice([" and ", " and ", ", and "]) + items[-1]


def with_article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def story_parts(ctx, n_things):
    rng = ctx.rng
    kind = rng.choice(KIND_HELD if ctx.held else KIND) if not ctx.chance(0.1 if ctx.held else 0.4) else ctx.word("animal")
    she = kind in SHE or (kind not in HE and ctx.chance(0.5))
    return {"h": ctx.word("name"), "k": kind, "tr": ctx.listed("trait") if ctx.held else ctx.word("trait"), "l": ctx.word("place"), "f": ctx.word("name"),
            "k2": rng.choice([k for k in KIND if k != kind]), "she": she, "things": [ctx.word("object") for _ in range(n_things)]}


def story_text(ctx, p, only=None):
    """A story, or one sentence of those given."""
    rng = ctx.rng

    def line(lines, **more):
        text = rng.choice(lines)
        mine, other = (0, 1) if p["she"] else (1, 0)
        for pair in (("She", "He"), ("she", "he"), ("her", "him"), ("Her", "His")):
            text = text.replace(f"[{pair[0]}|{pair[1]}]", pair[mine])
        return upper_first(expand(rng, text, {**p, **more}))

    if only:
        return line(only)
    out = [line(OPENING)]
    if ctx.chance(0.6):
        out.append(line(SECOND))
    for i, thing in enumerate(p["things"]):
        out.append(line(THING_FIRST if i == 0 else THING_NEXT, o=thing))
        r = rng.random() + (0.25 if len(p["things"]) > 3 else 0.0)
        if r < 0.4:
            out.append(line(THING_USE, o=rng.choice(p["things"][:i + 1])))
        elif r < 0.65:
            out.append(line(MIDDLE))
    out.append(line(ENDING[:4]))
    if ctx.chance(0.5):
        out.append(line(ENDING[4:]))
    return " ".join(out)


def story(ctx):
    rng = ctx.rng
    p = story_parts(ctx, rng.choice((1, 2, 2, 3, 3, 4)))
    asked = []
    hero = None
    if ctx.chance(0.75):
        hero = STORY_HERO_NP.say(ctx, **p)
        asked += [p[slot] for slot in ("h", "k", "tr") if re.search(rf"\b{p[slot]}\b", hero)]
    about = [STORY_HERO.say(ctx, hero=hero)] if hero else []
    if ctx.chance(0.55):
        about.append(STORY_PLACE.say(ctx, l=p["l"]))
        asked.append(p["l"])
    tail = ""
    use = not about or ctx.chance(0.75)
    if use:
        asked += p["things"]
        named = p["things"] if ctx.chance(0.5) else [with_article(t) for t in p["things"]]
        w = joined(ctx, named)
        if about and ctx.chance(0.5):
            tail = " " + STORY_ASIDE.say(ctx, w=w)
        else:
            about.append(STORY_WORDS.say(ctx, w=w))
            if len(about) == 1 and not ctx.new and ctx.chance(0.5):
                about = [rng.choice(("about ", "with ", "around ", "on ")) + w]
    if not use and not ctx.held:
        p["things"] = p["things"][:2]
    request = re.sub(r",(?=[.?!])", "", upper_first(STORY_FRAME.say(ctx, about=" ".join(about)))) + tail
    return Dialogue("story", [("user", ragged(ctx, request)), ("assistant", story_text(ctx, p))], {"words": asked})


def story_reading(ctx):
    p = story_parts(ctx, 2)
    text = story_text(ctx, p)
    q, a, slot = ask_about(ctx, RELATIONS["story"], p)
    return Dialogue("reading", [("user", TEXT_FIRST.say(ctx, t=text, q=q, w=label(ctx))), ("assistant", a)],
                    {"has": [p[slot]], "not": [p["f"]] if slot == "h" else []})


# ---------------------------------------------------------------- sums

ADD = Wording("ADD")
SUB = Wording("SUB")
MUL = Wording("MUL")
WORD_ADD = Wording("WORD_ADD")
WORD_SUB = Wording("WORD_SUB")


def held_pair(a, b):
    """One pair in eight never occurs in training, in either order."""
    a, b = min(a, b), max(a, b)
    return (a * 31 + b * 17 + a * b) % 8 == 3


def pair(ctx, low=0, high=99):
    while True:
        a, b = ctx.rng.randint(low, high), ctx.rng.randint(low, high)
        if held_pair(a, b) == ctx.held:
            return a, b


def sums_turn(ctx, graded=False):
    rng = ctx.rng
    r = 0.0 if graded else rng.random()
    low = 10 if graded or ctx.chance(0.75) else 0
    if r < 0.62:
        a, b = pair(ctx, low)
        if rng.random() < 0.15 and not graded:
            text = WORD_ADD.say(ctx, a=a, b=b, p=ctx.word("name"), q=ctx.word("name"), o=ctx.word("food"))
        else:
            text = ADD.say(ctx, a=a, b=b)
        reply = f"{a} + {b} = {a + b}."
    elif r < 0.87:
        a, b = pair(ctx, low)
        a, b = max(a, b), min(a, b)
        if rng.random() < 0.15:
            text = WORD_SUB.say(ctx, a=a, b=b, p=ctx.word("name"), q=ctx.word("name"), o=ctx.word("food"))
        else:
            text = SUB.say(ctx, a=a, b=b)
        reply = f"{a} - {b} = {a - b}."
    else:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        text, reply = MUL.say(ctx, a=a, b=b), f"{a} * {b} = {a * b}."
    return [("user", ragged(ctx, upper_first(text))), ("assistant", reply)], {"sum": reply.rstrip(".")}


DRILL = Wording("DRILL")


def drill(ctx):
    """Many sums at once: nothing else holds so many of them per token."""
    rng, asked, replies = ctx.rng, [], []
    for _ in range(rng.randint(4, 12)):
        a, b = pair(ctx, rng.choice((0, 10, 10, 10)))
        op = "+" if ctx.chance(0.7) else "-"
        if op == "-":
            a, b = max(a, b), min(a, b)
        asked.append(f"{a} {op} {b}")
        replies.append(f"{a} {op} {b} = {a + b if op == '+' else a - b}.")
    text = DRILL.say(ctx, x=joined(ctx, asked))
    return Dialogue("sums", [("user", upper_first(text)), ("assistant", " ".join(replies))])


def sums(ctx):
    if not ctx.held and ctx.chance(0.35):
        return drill(ctx)
    messages, check = sums_turn(ctx, graded=ctx.held)
    if not ctx.held:
        for _ in range(ctx.rng.choice((0, 1, 2, 3, 4))):
            more, check = sums_turn(ctx)
            messages += more
    return Dialogue("sums", messages, check)


# ---------------------------------------------------------------- JSON

JSON_PAIRS = Wording("JSON_PAIRS")
JSON_EXTRACT = Wording("JSON_EXTRACT")
JSON_LIST = Wording("JSON_LIST")
PAIR_STYLE = Wording("PAIR_STYLE")
# Names of fields and the kind of word that they hold; and what a slot of a relation is called as a field.
fields = lambda lines: dict(line.rsplit(" ", 1) for line in lines)
keys_of = lambda lines: {kind: keys.strip().split(", ") for kind, keys in (line.split(":", 1) for line in lines)}
FIELDS, FIELDS_HELD = fields(TRAIN["FIELDS"]), fields(HELD["FIELDS"])
KEY_OF, KEY_OF_HELD = keys_of(TRAIN["KEY_OF"]), keys_of(HELD["KEY_OF"])


def json_value(ctx, kind):
    if kind == "bool":
        return ctx.rng.choice([True, False])
    if kind in ("age", "price", "count", "year"):
        v = ctx.rng.randint(1, 99) if kind != "year" else ctx.rng.randint(100, 2099)
        return v
    v = ctx.word(kind)
    return int(v) if v.isdigit() and not v.startswith("0") else v


def shown(value):
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


EXTRACT = [r for r in THIRD if len(r.slots) >= 2 and r.name not in ("called", "secret", "thing", "where", "friend", "met", "family", "put")]


def odd_key(ctx, key):
    """A key that only contains what it asks for."""
    w = made_up(ctx.rng, False, (1, 2)) if ctx.chance(0.5) else ctx.rng.choice(STRANGE)
    return expand(ctx.rng, "[<w> <k>|<w>_<k>|<k>_<w>|<k> <w>|<k> of <w>|<k> in <w>|the <k>|<k>_of_<w>]", {"k": key, "w": w})


def json_turn(ctx):
    rng = ctx.rng
    r = rng.random()
    if r < 0.16:
        kind = rng.choice(["name", "town", "object", "food", "animal", "colour", "mix", "numbers"])
        n = rng.randint(2, 6)
        if kind == "numbers":
            items = [rng.randint(0, 99) for _ in range(n)]
        else:
            items = [ctx.word(rng.choice(["name", "object", "food", "town"]) if kind == "mix" else kind) for _ in range(n)]
        words = joined(ctx, [str(i) for i in items])
        return JSON_LIST.sentence(ctx, w=words), items
    if r < 0.42:
        if ctx.chance(0.1) and known(ctx, [RELATIONS["gave"]]):
            rel = RELATIONS["gave"]
            slots = fill(ctx, rel)
            keys = {"p": "from", "o": "item", "q": "to"}
        else:
            rel = rng.choice([r for r in known(ctx, EXTRACT) if r.name != "gave"])
            slots = fill(ctx, rel)
            table = KEY_OF_HELD if ctx.new else KEY_OF
            keys = {s: rng.choice(table.get(kind) or KEY_OF[kind]) for s, kind in rel.slots.items() if kind in KEY_OF}
            if rel.name == "pet":
                keys = {"p": "owner", "a": "animal", "n": "name"}
        if not ctx.held:
            keys = {s: odd_key(ctx, k) if ctx.chance(0.25) else k for s, k in keys.items()}
        if len(set(keys.values())) < len(keys):
            return json_turn(ctx)
        order = list(keys)
        rng.shuffle(order)
        order = order[:rng.randint(2, 3)]
        sentences = [state(ctx, rel, slots)]
        if ctx.chance(0.2):
            sentences.insert(rng.randint(0, 1), FILLER.say(ctx))
        value = {keys[s]: int(slots[s]) if slots[s].isdigit() else slots[s] for s in order}
        names = [keys[s] for s in order]
        return JSON_EXTRACT.sentence(ctx, k=joined(ctx, names), t=" ".join(sentences)), value
    kinds = FIELDS_HELD if ctx.new else FIELDS
    n = rng.choice((1, 2, 2, 3, 3, 4, 5))
    value = {}
    for key in rng.sample(list(kinds), n):
        if ctx.chance(0.3):
            k = ctx.word("madekey")
            value[k] = rng.randint(0, 99) if ctx.chance(0.25) else ctx.word(rng.choice(["madeval", "name", "town", "object"]))
        else:
            value[key] = json_value(ctx, kinds[key])
    style = PAIR_STYLE.pick(ctx)
    pairs = [expand(rng, style, {"k": k, "v": shown(v)}) for k, v in value.items()]
    if ctx.chance(0.2):
        data = rng.choice(["; ", ", ", "\n"]).join(pairs)
    else:
        data = joined(ctx, pairs)
    return JSON_PAIRS.sentence(ctx, d=data), value


def json_skill(ctx):
    messages = []
    for _ in range(1 if ctx.held else ctx.rng.choice((1, 1, 2, 3))):
        text, value = json_turn(ctx)
        messages += [("user", ragged(ctx, text) if ctx.chance(0.5) else text), ("assistant", dumps(value))]
    return Dialogue("json", messages, {"json": value})


# ---------------------------------------------------------------- lists and facts

ORDERED = {
    "the days of the week|the week days|the seven days": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "the months|the months of the year|the twelve months":
        "January February March April May June July August September October November December",
    "the seasons|the four seasons|the seasons of the year": "spring summer autumn winter",
    "the planets|the eight planets|the planets of the sun": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
    "the colours of the rainbow|the rainbow colours": "red orange yellow green blue indigo violet",
    "the numbers from 1 to 10|the first ten numbers": "1 2 3 4 5 6 7 8 9 10",
    "the even numbers up to 10|the even numbers from 2 to 10": "2 4 6 8 10",
    "the odd numbers up to 9|the odd numbers from 1 to 9": "1 3 5 7 9",
    "the continents|the seven continents": "Africa Antarctica Asia Australia Europe North_America South_America",
    "the five senses|the senses": "sight hearing smell taste touch",
    "the meals of the day|the three meals": "breakfast lunch dinner",
    "the oceans|the five oceans": "Pacific Atlantic Indian Southern Arctic",
    "the vowels|the five vowels": "a e i o u",
    "the points of the compass|the four directions": "north east south west",
    "the primary colours|the three primary colours": "red yellow blue",
}
COUNTED = {
    "fruits|kinds of fruit": "apple pear plum cherry grape melon peach lemon orange banana",
    "animals|kinds of animals": "cat dog horse cow sheep goat lion bear fox wolf",
    "farm animals|animals on a farm": "cow horse pig sheep goat hen duck donkey goose turkey",
    "colours|different colours": "red blue green yellow black white brown pink orange grey",
    "vegetables|kinds of vegetables": "carrot potato tomato onion pea bean corn pumpkin spinach cabbage",
    "birds|kinds of birds": "robin sparrow owl eagle swan duck goose parrot penguin raven",
    "tools|useful tools": "hammer saw nail drill axe shovel rake ladder rope brush",
    "drinks|things to drink": "water milk tea juice coffee lemonade cocoa cider soda broth",
    "jobs|kinds of work": "baker teacher doctor farmer sailor painter cook driver nurse pilot",
    "things in a kitchen|kitchen things": "pot pan spoon fork knife plate cup bowl oven kettle",
    "clothes|things to wear": "shirt coat hat scarf shoe sock glove dress jacket belt",
    "sports|kinds of sport": "football tennis swimming running skiing rowing cycling hockey golf judo",
    "trees|kinds of trees": "oak pine birch elm maple willow beech ash fir palm",
    "musical instruments|instruments": "piano violin flute drum guitar trumpet harp cello horn organ",
    "school subjects|subjects at school": "maths history art science music reading geography sport writing drama",
    "vehicles|ways to travel": "bus train bike car boat ship plane taxi tram truck",
}
NUMBER = "zero one two three four five six seven eight nine ten".split()
LIST_ORDERED = Wording("LIST_ORDERED")
LIST_COUNTED = Wording("LIST_COUNTED")
LIST_COPY = Wording("LIST_COPY")


def numbered(items):
    return "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1))


def lists_turn(ctx):
    rng = ctx.rng
    r = rng.random()
    if r < 0.35:
        names, items = rng.choice(list(ORDERED.items()))
        items = [i.replace("_", " ") for i in items.split()]
        text = LIST_ORDERED.say(ctx, x=rng.choice(names.split("|")))
    elif r < 0.75:
        names, items = rng.choice(list(COUNTED.items()))
        n = rng.choice((3, 3, 4, 5, 5, 6, 7, 8, 10))
        items = items.split()[:n]
        text = LIST_COUNTED.say(ctx, n=rng.choice([str(n), NUMBER[n]]), x=rng.choice(names.split("|")))
    else:
        kind = rng.choice(["object", "food", "name", "animal", "town"])
        items = [ctx.word(kind) for _ in range(rng.randint(2, 6))]
        text = LIST_COPY.sentence(ctx, w=joined(ctx, items))
    if r < 0.75:
        text = upper_first(text)
    return [("user", ragged(ctx, text)), ("assistant", numbered(items))], {"items": items}


def lists(ctx):
    messages, check = lists_turn(ctx)
    return Dialogue("lists", messages, check)


CAPITALS = """France Paris;Italy Rome;Spain Madrid;Germany Berlin;England London;Portugal Lisbon;Norway Oslo;Sweden Stockholm;
Denmark Copenhagen;Finland Helsinki;Poland Warsaw;Austria Vienna;Greece Athens;Ireland Dublin;Japan Tokyo;China Beijing;
India Delhi;Egypt Cairo;Russia Moscow;Canada Ottawa;Peru Lima;Cuba Havana;Kenya Nairobi;Turkey Ankara;Hungary Budapest"""
LEGS = "dog four;cat four;horse four;cow four;bird two;hen two;duck two;spider eight;ant six;bee six;snake no;fish no;human two;sheep four"
SOUNDS = "dog barks;cat meows;cow moos;duck quacks;sheep bleats;horse neighs;lion roars;bee buzzes;frog croaks;owl hoots;hen clucks;wolf howls;pig grunts;snake hisses"
BABIES = "dog puppy;cat kitten;cow calf;sheep lamb;horse foal;duck duckling;hen chick;goat kid;bear cub;frog tadpole;pig piglet;swan cygnet"
COLOURS = "grass green;snow white;coal black;blood red;milk white;a banana yellow;a lemon yellow;the night black;a carrot orange;the sea blue;a leaf green;chocolate brown"
OPPOSITES = """hot cold;big small;up down;day night;happy sad;fast slow;open closed;old young;full empty;light dark;early late;high low;
wet dry;soft hard;loud quiet;rich poor;left right;near far;strong weak;clean dirty;thick thin;first last;inside outside;long short"""
COUNTS = """days week 7;months year 12;hours day 24;minutes hour 60;seconds minute 60;fingers hand 5;wheels bike 2;wheels car 4;
legs table 4;sides triangle 3;sides square 4;days year 365;letters alphabet 26;players football_team 11;strings violin 4"""
HOMES = "bee hive;bird nest;fox den;spider web;horse stable;pig sty;fish water;dog kennel;king castle;lion den;rabbit burrow"
MAKES = "bread baker;a house builder;a table carpenter;a picture painter;a song singer;soup cook;a coat tailor;a book writer;a film director;a pot potter"


def _rows():
    """(relation, slots) of everything that is common knowledge."""
    cells = lambda table: [row.split() for row in table.replace("\n", "").split(";")]
    pairs = lambda table: [(" ".join(row[:-1]), row[-1]) for row in cells(table)]
    out = {
        "capital": pairs(CAPITALS), "capital_of": pairs(CAPITALS), "legs": pairs(LEGS), "sound": pairs(SOUNDS), "baby": pairs(BABIES),
        "colour": pairs(COLOURS), "opposite": pairs(OPPOSITES) + [p[::-1] for p in pairs(OPPOSITES)],
        "home": [(x, y if y == "water" else "a " + y) for x, y in pairs(HOMES)], "maker": pairs(MAKES),
    }
    for name in ("day", "month"):
        order = LISTS[name][0]
        out["after_" + name] = [(x, order[(i + 1) % len(order)]) for i, x in enumerate(order)]
        out["before_" + name] = [(x, order[i - 1]) for i, x in enumerate(order)]
    rows = [(RELATIONS["fact_" + name], dict(zip("xy", row))) for name, table in out.items() for row in table]
    return rows + [(RELATIONS["fact_count"], dict(x=x, y=y.replace("_", " "), n=n)) for x, y, n in cells(COUNTS)]


FACTS = _rows()


def facts_turn(ctx):
    relation, slots = ctx.rng.choice([row for row in FACTS if known(ctx, [row[0]])])
    q, a, asked = ask_about(ctx, relation, slots)
    return [("user", q), ("assistant", a)], {"has": [slots[asked].removeprefix("a ")], "not": []}


def facts(ctx):
    messages, check = facts_turn(ctx)
    for _ in range(0 if ctx.held else ctx.rng.choice((0, 1, 2))):
        more, check = facts_turn(ctx)
        messages += more
    return Dialogue("facts", messages, check)


# ---------------------------------------------------------------- talk

SORRY = "I am sorry, I cannot help with that. I am a small model: I can tell stories, answer questions about a text, do small sums, make lists and write JSON."
ABOUT = "I am Corella Nano, a very small language model. I can tell stories, answer questions about a text, do small sums, make lists and write JSON."

HELLO = ["Hello! How can I help you?", "Hi! What can I do for you?", "Hello! Nice to hear from you."]
JOKES = ["Why did the hen cross the road? To get to the other side!", "What has four legs and cannot walk? A table!",
         "What has hands and cannot clap? A clock!", "What has teeth and cannot bite? A comb!"]

TALK = [
    (Wording("TALK_HELLO"), HELLO),
    (Wording("TALK_HOW"), ["I am fine, thank you. How are you?", "I am very well, thank you!", "I am fine, thank you for asking."]),
    (Wording("WHO"), [ABOUT]),
    (Wording("TALK_THANKS"), ["You are welcome!", "I am glad that I could help.", "You are welcome! Is there anything else?"]),
    (Wording("TALK_BYE"), ["Goodbye! Have a nice day.", "Goodbye! See you soon.", "Bye! Take care."]),
    (Wording("TALK_SAD"), ["I am sorry to hear that. I hope that you feel better soon.", "I am sorry. Do you want to hear a story?"]),
    (Wording("TALK_HAPPY"), ["That is good to hear!", "That is great! I am happy for you."]),
    (Wording("TALK_TIRED"), ["You should get some rest. Sleep well!", "Then it is time for a rest."]),
    (Wording("TALK_BORED"), ["Shall I tell you a story?", "We could do some sums, or I could tell you a story."]),
    (Wording("TALK_JOKE"), JOKES[:2]),
]
MET = Wording("MET")
LIKE = Wording("LIKE")
OUT = Wording("OUT")
LANDS = "France Italy Spain Germany England Portugal Norway Sweden Poland Japan China India Egypt Russia Canada Peru Brazil Mexico Chile Korea".split()


def talk_turn(ctx):
    rng = ctx.rng
    r = rng.random()
    if r < 0.14:
        n = ctx.word("name")
        return [("user", ragged(ctx, MET.say(ctx, n=n))), ("assistant", f"Nice to meet you, {n}!")], {"has": [n], "not": []}
    if r < 0.2:
        f = ctx.word("food")
        return [("user", ragged(ctx, upper_first(LIKE.say(ctx, f=f)))), ("assistant", f"I do not eat, but I have heard of {f}.")], {"has": [f], "not": []}
    if r < 0.45:
        text = OUT.say(ctx, land=rng.choice(LANDS), year=rng.randint(1500, 2030), o=ctx.word("object"), w=ctx.invented())
        return [("user", ragged(ctx, upper_first(text)).replace("?.", "?")), ("assistant", SORRY)], {"equals": [SORRY]}
    wording, replies = rng.choice(TALK)
    return [("user", ragged(ctx, wording.say(ctx))), ("assistant", rng.choice(replies))], {"equals": replies}


SYSTEM_NAME = Wording("SYSTEM_NAME")
WHO = TALK[2][0]
WHO_NAME = Wording("WHO_NAME")
SYSTEM_START = Wording("SYSTEM_START")
SYSTEM_END = Wording("SYSTEM_END")
SYSTEM_PLAIN = ["You are a helpful assistant.", "You are a friendly assistant.", "Be polite and short.", "You are Corella, a helpful assistant.",
                "Answer in simple English.", "Answer the questions of the user.", "You are a helpful, honest assistant. Keep your answers short."]


def system_prompt(ctx):
    rng = ctx.rng
    r = rng.random()
    if r < 0.45:
        n, j = ctx.word("name"), ctx.listed("job")
        messages = [("system", SYSTEM_NAME.say(ctx, n=n, j=j, t=ctx.listed("trait")))]
        if ctx.chance(0.3):
            messages += talk_plain(ctx)
        messages += [("user", ragged(ctx, WHO_NAME.say(ctx))), ("assistant", f"I am {n}.")]
        return Dialogue("system", messages, {"has": [n], "not": []})
    w = rng.choice([ctx.word("name"), ctx.invented(True), "Well", "Hello", "Listen", "Dear friend", "Over", "The end", "Amen", "Yes"])
    start = ctx.chance(0.5)
    messages = [("system", (SYSTEM_START if start else SYSTEM_END).say(ctx, w=w))]
    turns = rng.choice((1, 1, 2)) if not ctx.held else 1
    for _ in range(turns):
        turn, _c = rng.choice([sums_turn, facts_turn, facts_turn, talk_turn])(ctx)
        reply = turn[1][1]
        messages += [turn[0], ("assistant", f"{w}. {reply}" if start else f"{reply} {w}.")]
    return Dialogue("system", messages, {"equals": [messages[-1][1]]})


def talk_plain(ctx):
    wording, replies = ctx.rng.choice(TALK[:2] + TALK[3:])
    return [("user", ragged(ctx, wording.say(ctx))), ("assistant", ctx.rng.choice(replies))]


def talk(ctx):
    if ctx.chance(0.3):
        return system_prompt(ctx)
    messages, check = talk_turn(ctx)
    for _ in range(0 if ctx.held else ctx.rng.choice((0, 0, 1, 2))):
        more, check = talk_turn(ctx)
        messages += more
    return Dialogue("refuse" if check.get("equals") == [SORRY] else "talk", messages, check)


# ---------------------------------------------------------------- the first things that people type

ENGLISH = "I only speak English. In English I can tell stories, answer questions about a text, do small sums, make lists and write JSON."
HERE_I_AM = ["I am here. How can I help you?", "I am here. Shall I tell you a story?"]
POEM_ABOUT = """
I think of <x> every day,/in morning light and on my way.
When all the stars are shining bright,/I dream of <x> in the night.
Of <x> I will sing a song,/a little one that is not long.
When I see <x>, I have to smile,/and then I sing a little while.
They say that <x> can make you glad,/and comfort you when you are sad.
Here is a little rhyme to keep,/of <x> I dream when I am asleep.
""".strip().splitlines()
POEM = """
The sun goes down, the moon is high,/and small white clouds sail through the sky.
A bird sings softly in the tree,/it sings for you, it sings for me.
The rain falls gently on the sea,/and all the world belongs to me.
The wind comes whispering through the wheat,/the summer grass is warm and sweet.
A candle burns beside my bed,/with many dreams inside my head.
The snow lies white on every hill,/the night is long, the world is still.
So close your eyes and go to bed,/the stars will shine above your head.
And when the morning comes again,/we hear the music of the rain.
A little boat goes out to sea,/and brings a shell for you and me.
The fire is low, the day is done,/good night to moon, good night to sun.
""".strip().splitlines()
PLAIN_START = """
The <k> said[,|:] "[Come with me|Do not worry|Let us try again|It is late|I am <tr>|Look, a bird|Good morning|I have an idea]."
The <k> [was <tr>|was very <tr> that day|lived in a <l>|came to a <l>|had a dream|was called <h>|looked at the sky|smiled and began to sing].
[A|One] <k> [said|sang|asked]: "[Who are you|Where is my friend|Who wants to play|May I come in]?"
[Once|Twice|Often], [a|the] <k> [was <tr>|came to a <l>|asked for help].
""".strip().splitlines()
HANZI = """的一是不了在人有我他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可里后小么心多天而能好都然没日于起还
    发成事只作当想看文无开手十用主行方又如前所本见经头面公同三已老从动两长知民样现分将外但身些与高意进把法此实回二理美点月明其种声全工己话儿者向情部
    正名定女问力机给等几很业最间新什打便位因重被走电四第门相次东政海口使教西再平真听世气信北少关并内加化由却代军产入先山五太水万市""".replace(" ", "").replace("\n", "")
FIRST_WORDINGS = {name: Wording("FIRST_" + name) for name in """STORY TOPIC DID POEM THEME HELLO TEST WHO ABLE MORE AGAIN ADD SUB MUL JOKE
    SKY LIFE PROGRAM PRINT GERMAN CHINESE OTHER SYSTEM""".split()}
# Of the prompts in this file training has none, and none of what is held out elsewhere.
plainly = lambda text: " ".join(re.sub(r"[^\w+*/-]+", " ", text.lower()).split())
FIRST_HELD = {plainly(line) for line in (HERE / "first_things.txt").read_text().splitlines() if line and line[0] != "#"}
FIRST_HELD |= {plainly(line) for lines in HELD.values() for line in lines if "<" not in line}


def typed(ctx, text):
    """As it is typed into an empty field: often without capitals and marks."""
    r = ctx.rng.random()
    text = text[:1].lower() + text[1:] if r < 0.2 else text.lower() if r < 0.45 else upper_first(text) if r < 0.8 else text
    return text[:-1] if text[-1:] in ".?!" and len(text) > 1 and ctx.chance(0.3) else text


def first_story(ctx):
    """One that nothing is asked of, or that is about one thing; and how it goes on."""
    rng = ctx.rng
    r = rng.random()
    ctx.plain = r < 0.65 or ctx.chance(0.6)  # a story that must copy nothing is told in words that mean something
    p = story_parts(ctx, rng.choice((1, 1, 2)))
    ctx.plain = True
    p = {**p, **{slot: v for slot, v in story_parts(ctx, 1).items() if slot in ("h", "l", "f")}}
    ctx.plain = False
    say = lambda name, **slots: FIRST_WORDINGS[name].say(ctx, **slots)
    if r < 0.3:
        text = say("STORY")
    elif r < 0.65:
        text = re.sub(r" *,? *<about>", "", STORY_FRAME.pick(ctx))
        text = re.sub(r" +(?=[.,?!:])", "", expand(rng, text))
    else:
        w = ctx.rng.choice([p["k"], p["k"], f"{p['tr']} {p['k']}", f"{p['k']} who {say('DID', o=p['things'][0], l=p['l'])}"])
        text = say("TOPIC", k=p["k"], w=w)
    messages = [("user", typed(ctx, text)), ("assistant", story_text(ctx, p))]
    if ctx.chance(0.2):
        line = lambda lines: story_text(ctx, {**p, "things": []}, lines)
        messages += [("user", typed(ctx, say("MORE", h=p["h"]))), ("assistant", " ".join((line(MIDDLE), line(MIDDLE), line(ENDING[:4]))))]
    return messages


def first_poem(ctx):
    rng, about, theme = ctx.rng, "", None
    if ctx.chance(0.5):
        theme = FIRST_WORDINGS["THEME"].say(ctx, a=ctx.word("animal"), o=ctx.word("object"), l=ctx.word("place"))
        about = rng.choice(["about ", "about ", "about ", "on ", "for ", "of "]) + theme
    i = rng.randrange(len(POEM))  # few couplets follow each other: a model so small would else repeat some for ever
    lines = [rng.choice(POEM_ABOUT) if theme else POEM[i], POEM[(i + rng.choice((1, 3))) % len(POEM)]]
    reply = "\n".join(upper_first(line) for couplet in lines for line in expand(rng, couplet, {"x": theme}).split("/"))
    text = re.sub(r" +(?=[.,?!:])", "", FIRST_WORDINGS["POEM"].say(ctx, about=about))
    return [("user", typed(ctx, text)), ("assistant", reply)]


def first_sum(ctx):
    rng, op = ctx.rng, ctx.rng.choice("++++--**")
    a, b = pair(ctx, 0, rng.choice((9, 9, 9, 12, 20, 99))) if op != "*" else (rng.randint(0, 10), rng.randint(0, 10))
    if op == "-":
        a, b = max(a, b), min(a, b)
    name, value = {"+": ("ADD", a + b), "-": ("SUB", a - b), "*": ("MUL", a * b)}[op]
    turn = [("user", typed(ctx, FIRST_WORDINGS[name].say(ctx, a=a, b=b))), ("assistant", f"{a} {op} {b} = {value}.")]
    return turn + first_sum(ctx) if ctx.chance(0.6) else turn


def first_print(ctx):
    name, n = ctx.rng.choice("ijkx"), ctx.rng.randint(2, 9)
    text = re.sub(r"for \w in", f"for {name} in", FIRST_WORDINGS["PRINT"].say(ctx, n=n, v=name))
    return [("user", text), ("assistant", "\n".join(map(str, range(n))))]


def first_words(ctx):
    """What is answered from a list of replies."""
    both = lambda name, *more: ctx.rng.choice([FIRST_WORDINGS[name], *more])
    hello, who, joke = TALK[0][0], TALK[2][0], TALK[9][0]
    table = [(18, both("HELLO", hello), HELLO), (14, both("WHO", FIRST_WORDINGS["WHO"], who), [ABOUT]), (16, FIRST_WORDINGS["ABLE"], [ABOUT]),
             (5, FIRST_WORDINGS["TEST"], HERE_I_AM), (7, both("JOKE", joke), JOKES), (9, FIRST_WORDINGS["GERMAN"], [ENGLISH]),
             (8, FIRST_WORDINGS["CHINESE"], [ENGLISH]), (5, FIRST_WORDINGS["OTHER"], [ENGLISH]),
             (4, FIRST_WORDINGS["SKY"], ["The sky is blue because the air scatters blue light more than red light."]),
             (4, FIRST_WORDINGS["LIFE"], ["Some say that it is 42."]),
             (4, FIRST_WORDINGS["PROGRAM"], ["Ada Lovelace wrote the first program."])]
    _, wording, replies = ctx.rng.choices(table, [row[0] for row in table])[0]
    text = wording.say(ctx)
    if wording.name == "FIRST_CHINESE" and ctx.chance(0.4):
        text = "".join(ctx.rng.choices(HANZI, k=ctx.rng.randint(2, 14))) + ctx.rng.choice(["？", "。", "", "吗？", "！"])
    messages = [("user", typed(ctx, text)), ("assistant", ctx.rng.choice(replies))]
    if replies in (HELLO, JOKES) and ctx.chance(0.12):
        messages += [("user", typed(ctx, FIRST_WORDINGS["AGAIN"].say(ctx))), messages[-1]]
    return messages


def first_turn(ctx):
    while True:
        make = ctx.rng.choices((first_story, first_poem, first_sum, first_print, first_words), (32, 14, 16, 1, 37))[0]
        messages = make(ctx)
        if FIRST_HELD.isdisjoint(plainly(text) for role, text in messages if role == "user"):
            return messages


def first_things(ctx):
    messages = []
    for _ in range(ctx.rng.choice((1, 1, 1, 2, 3))):
        messages += first_turn(ctx)
    if ctx.chance(0.2):
        messages.insert(0, ("system", FIRST_WORDINGS["SYSTEM"].say(ctx)))
    return Dialogue("first", messages)


# ---------------------------------------------------------------- the whole

SKILLS = {"story": story, "reading": reading, "json": json_skill, "sums": sums, "talk": talk, "lists": lists, "facts": facts}


def dialogue(rng):
    """One training dialogue."""
    if FIRST_SHARE and rng.random() < FIRST_SHARE:
        return first_things(Context(rng)).messages
    mix = FRESH_MIX if FRESH else LAST_MIX if LAST else MIX
    messages = SKILLS[rng.choices(list(mix), list(mix.values()))[0]](Context(rng)).messages
    if messages[0][0] != "system" and rng.random() < 0.06:
        messages.insert(0, ("system", rng.choice(SYSTEM_PLAIN)))
    return messages


def plain_text(rng):
    ctx = Context(rng)
    if FIRST_SHARE and ctx.chance(0.6):  # as people begin a text that is to be continued
        ctx.plain = True
        p = story_parts(ctx, rng.randint(1, 3))
        return expand(rng, rng.choice(PLAIN_START), p) + " " + story_text(ctx, p)
    return story_text(ctx, story_parts(ctx, rng.randint(1, 3)))


def long_dialogue(rng, fits):
    """Tasks one after another for as long as `fits(messages)`: what a long conversation looks like."""
    messages = dialogue(rng)
    while messages[0][0] == "system" and messages[0][1] not in SYSTEM_PLAIN:
        messages = dialogue(rng)  # such a prompt would bind the other tasks as well
    while True:
        more = [m for m in dialogue(rng) if m[0] != "system" or m[1] not in SYSTEM_PLAIN]
        if more[0][0] == "system":
            continue
        if not fits(messages + more):
            return messages
        messages += more


HELD_SKILLS = {"story": story, "reading": lambda c: _only(reading, c, "reading"), "earlier": earlier_turn, "json": json_skill,
               "sums": sums, "lists": lists, "facts": facts, "talk": lambda c: _only(talk, c, "talk"),
               "refuse": lambda c: _only(talk, c, "refuse"), "system": system_prompt}


def _only(make, ctx, skill):
    while True:
        d = make(Context(ctx.rng, ctx.held, ctx.held and not ctx.new))
        if d.skill == skill:
            return d


def held_out(seed, per_skill, known_wordings=False):
    """The held-out set: the same seed gives the same dialogues for ever."""
    return [HELD_SKILLS[skill](Context(random.Random(f"held-{seed}-{skill}-{i}"), True, known_wordings))
            for skill in HELD_SKILLS for i in range(per_skill)]


if __name__ == "__main__":
    import sys

    rng = random.Random(sys.argv[1] if len(sys.argv) > 1 else 0)
    for _ in range(12):
        print("\n".join(f"{role}: {text}" for role, text in dialogue(rng)), end="\n\n")
