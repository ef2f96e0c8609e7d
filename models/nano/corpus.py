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
from functools import lru_cache
from pathlib import Path

from words import LISTS, is_held_word, made_up

HERE = Path(__file__).parent
# Training has three stages; plan.json says from which step on. The second puts strange words
# into requests and statements and more work into a text. The third makes up words for all kinds
# of places, by more than one recipe. The fourth turns to what is learnt last, exact copying, and
# away from stories, whose many free words are half of all that is said. The held-out set knows
# no stages.
STAGE = 1
MIX = {"story": 20, "reading": 28, "json": 18, "sums": 14, "talk": 12, "lists": 4, "facts": 4}
LAST_MIX = {"story": 13, "reading": 37, "json": 31, "sums": 8, "talk": 6, "lists": 3, "facts": 2}


@dataclass
class Dialogue:
    skill: str
    messages: list  # of (role, text); the last one is the assistant's
    check: dict = field(default_factory=dict)  # how evaluate.py judges the last reply
    graded: bool = True


# ---------------------------------------------------------------- wordings

@lru_cache(maxsize=None)
def _parse(text):
    """"a [b|c] <d>" as nested lists: strings, ("slot", name), ("choice", [sequence])."""
    pos = 0

    def sequence(closing):
        nonlocal pos
        out, start = [], pos
        while pos < len(text):
            ch = text[pos]
            if ch in closing:
                break
            if ch == "[":
                out.append(text[start:pos])
                pos += 1
                options = [sequence("|]")]
                while text[pos] == "|":
                    pos += 1
                    options.append(sequence("|]"))
                pos += 1
                out.append(options)
                start = pos
            elif ch == "<":
                out.append(text[start:pos])
                end = text.index(">", pos)
                out.append((text[pos + 1:end],))
                pos = start = end + 1
            else:
                pos += 1
        out.append(text[start:pos])
        return [part for part in out if part != ""]

    return sequence("")


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

    return re.sub(r"\b([Aa]) (?=[aeiou]|hour)", r"\1n ", walk(_parse(text)).replace("  ", " ").replace(" .", "."))


def upper_first(text):
    return text[:1].upper() + text[1:]


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


def strange(ctx, template):
    """Puts unknown words in the place of some that do not carry the task, so that one unknown word
    in a request does not turn a known task into an unknown one."""
    rng = ctx.rng
    parts = re.split(r"(<[^>]*>|\[[^\[\]]*\]|[A-Za-z']+)", template)
    keep = TASK_WORDS - {"list", "array", "object"} if STAGE > 3 and "JSON" in template else TASK_WORDS
    spots = [i for i, w in enumerate(parts) if w and w[0].isalpha() and w.lower() not in keep]
    for i in rng.sample(spots, min(len(spots), rng.choice((1, 1, 2, 3)))):
        w = made_up(rng, False) if rng.random() < 0.5 else rng.choice(STRANGE)
        parts[i] = upper_first(w) if parts[i][0].isupper() else w
    return "".join(parts)


class Wording:
    """Wordings for training and, apart from them, for the held-out set."""

    all = []

    def __init__(self, train, held):
        lines = lambda s: [line.strip().replace("¶", "\n") for line in s.strip().splitlines()] if isinstance(s, str) else list(s)
        self.train, self.held = lines(train), lines(held)
        Wording.all.append(self)

    def say(self, ctx, **slots):
        return expand(ctx.rng, self.pick(ctx), slots)

    def sentence(self, ctx, **slots):
        """With a capital, unless it starts with words to be copied: these must stay as they are."""
        template = self.pick(ctx)
        text = expand(ctx.rng, template, slots)
        return text if template.startswith("<") and (STAGE > 2 or ctx.held) else upper_first(text)

    def pick(self, ctx):
        template = ctx.rng.choice(self.held if ctx.new else self.train)
        if STAGE > 1 and not ctx.held and "<" in template and ctx.chance(0.3):
            template = strange(ctx, template)
        return template


# The share of made-up words that the third stage adds.
MORE = {"place": 0.25, "object": 0.2, "animal": 0.2, "food": 0.15, "job": 0.2, "colour": 0.15, "hobby": 0.15, "instrument": 0.15, "spot": 0.2,
        "material": 0.15, "vehicle": 0.15, "weather": 0.15, "shop": 0.15, "subject": 0.15, "drink": 0.1, "trait": 0.15, "relative": 0.1,
        "thingname": 0.15}
SPOTS = ["in", "on", "under", "behind", "near", "beside", "inside", "by", "below", "above", "next to", "in front of", "on top of", "close to"]
PLAIN_WORDS = sorted({part.lower() for train, _ in LISTS.values() for w in train for part in w.split() if len(part) > 3} | set(STRANGE))


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

    def invented(self, capital=False):
        w = spliced(self.rng) if STAGE > 2 and not self.held and self.chance(0.5) else made_up(self.rng, self.held)
        return upper_first(w) if capital else w

    def _word(self, kind):
        rng = self.rng
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
            if STAGE > 2 and not self.held and self.chance(0.25):
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
        if STAGE > 2 and not self.held and rng.random() < MORE.get(kind, 0.0):
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

ASK_DIRECT = Wording("""
    <q>?
    <q>?
    <q>
    [So|Now|And|Well|OK|Hm|Please|Hey|Hello|Hi|Quick question|Question|One question|One more thing], <q>?
    [Question|My question|Here is my question|Now the question|Please answer|Answer this|Tell me|Q]: <q>?
    <q>, please?
    <q>[, do you know| do you think|, can you tell| again|, please]?
    [I wonder|I am curious|I forgot|I am not sure]: <q>?
    [Can|Could|Would] you [tell me|answer this|say|help me]: <q>?
    <q>? [Please answer.|Please tell me.|Answer in one sentence.|Thanks!|Thank you.|Please.|I forgot.|Do you know?]
    <q>? [I need to know.|I want to know.|Just tell me.|It is important.|Quickly, please.|I have no idea.|Help me, please.]
    [What do you think|What do you say|What would you say|Can you guess|Can you see it|Say]: <q>?
    [Excuse me|Sorry|Pardon|My friend|Dear model|Corella|Listen|Look|Wait|Alright|Next question|Last question|Another question], <q>?
    [The question is|I ask you|They ask|My teacher asks|My friend asks|Somebody asked|A child asks|We want to know|It is the question]: <q>?
    [Just|And|But|Or] <q>?
    <q>, [I wonder|I ask|my friend|by the way|if you know|if I may ask|exactly|then|actually]?
    [Short question|Simple question|Easy one|A question for you|A riddle|Your task|Task|Exercise]: <q>?
    """, """
    Let us see: <q>?
    Remind me, <q>?
    <q>? I would love an answer.
    Right, then: <q>?
    """)
ASK_INDIRECT = Wording("""
    [Please |]tell me <q>.
    [Please |]tell me <q>
    [Can|Could|Would|Will] you [please |]tell me <q>?
    Do you [know|remember] <q>?
    I [want|would like|need|wish|have] to know <q>.
    I'd like to know <q>[.|, please.]
    [Please |]say <q>[.| in one sentence.| in a few words.]
    [Please |]name <q>.
    Can you [say|see|guess|find|find out|remember|name|give me] <q>?
    [Please |]find [out |]<q>.
    [Now|Next|Then|OK, now|So] tell me <q>[, please|].
    I [forgot|do not know|am not sure about|ask you] <q>. [Can you help?|Tell me.|Please help.|Do you know?]
    What can you [say|tell me] about <q>?
    Are you able to [tell me|say] <q>?
    [Hey|Hi|Hello|OK|Well|Please], [tell me|can you tell me|do you know] <q>?
    [Give|Show|Write|Explain|Answer] me <q>.
    I [wonder|ask myself] <q>.
    [I am|We are] [looking for|asking for|curious about|interested in] <q>.
    [My question|The question] is about <q>.
    [Help me|Please help me|Try] to [find|find out|understand|remember] <q>.
    Will you [say|tell me|name|give me] <q>?
    [Do|Don't] you know <q>?
    I have [no idea|forgotten|a question about] <q>.
    [It is important to know|I must know|We need] <q>.
    [You know|You surely know|You can tell me] <q>, [right|yes|don't you]?
    [Answer|Reply|Write] [in one sentence|in a sentence|briefly|shortly]: <q>.
    Is it known <q>?
    [Be so kind and|Be nice and|Come on,|Quickly,] tell me <q>.
    [Let me|Let us] [know|hear|see] <q>[, please|].
    [Say|State|Mention|Repeat] <q>[.|, please.]
    [Would|Could] you [mind telling|kindly tell|let] me [know |]<q>?
    I [was wondering|keep asking myself|asked you] <q>.
    [Your task|Task|Question]: [find|tell me|name|say] <q>.
    """, """
    Kindly let me know <q>.
    It would help me to learn <q>.
    Would you be so good as to state <q>?
    Any idea <q>?
    """)


def ragged(ctx, text):
    """Half the world types without capitals and full stops."""
    if ctx.chance(0.12):
        text = text[:1].lower() + text[1:]
    if ctx.chance(0.1) and text[-1:] in ".?!":
        text = text[:-1]
    return text


def question(ctx, direct, indirect, slots):
    rng = ctx.rng
    odd = lambda template: strange(ctx, template) if STAGE > 1 and not ctx.held and "<" in template and ctx.chance(0.15) else template
    if indirect and (not direct or ctx.chance(0.45)):
        return ragged(ctx, upper_first(ASK_INDIRECT.say(ctx, q=expand(rng, odd(rng.choice(indirect)), slots))))
    text = expand(rng, odd(rng.choice(direct)), slots)
    if not ctx.held and ctx.chance(0.05):  # people leave out the small words
        text = re.sub(r"^(what|which|who|where|how|when) (is|are|was|does|did|do) |\\b(the|a) ", "", text, count=2)
    if ctx.chance(0.4):
        return ragged(ctx, upper_first(text) + "?")
    frame = ASK_DIRECT.pick(ctx)
    text = upper_first(text) if frame.startswith("<q>") or (": <q>" in frame and ctx.chance(0.5)) else text
    return ragged(ctx, upper_first(expand(rng, frame, {"q": text})))


# ---------------------------------------------------------------- reading

@dataclass
class Ask:
    slot: str
    answer: str
    direct: list
    indirect: list
    direct_held: list
    indirect_held: list


@dataclass
class Relation:
    name: str
    slots: dict
    say: list
    say_held: list
    asks: list

    def fill(self, ctx):
        return {slot: ctx.word(kind) for slot, kind in self.slots.items()}

    def state(self, ctx, slots):
        lines = self.say_held if ctx.new else self.say
        line = ctx.rng.choice(lines)
        if STAGE > 1 and not ctx.held and ctx.chance(0.25):
            line = strange(ctx, line)
        return upper_first(expand(ctx.rng, line, slots))

    def ask(self, ctx, slots, not_slot=None):
        options = [a for a in self.asks if a.slot != not_slot] or self.asks
        a = ctx.rng.choice(options)
        d, i = (a.direct_held, a.indirect_held) if ctx.new else (a.direct, a.indirect)
        return question(ctx, d, i, slots), upper_first(expand(ctx.rng, a.answer, slots)), slots[a.slot], a


def _load_relations():
    out = []
    for line in (HERE / "relations.txt").read_text().splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "#" and re.fullmatch(r"\w+( \w+=\w+)+", rest):
            name, *slots = rest.split()
            out.append(Relation(name, dict(s.split("=") for s in slots), [], [], []))
        elif mark == "+":
            out[-1].say.append(rest)
        elif mark == "-":
            out[-1].say_held.append(rest)
        elif mark == "?":
            slot, _, answer = rest.partition(" : ")
            out[-1].asks.append(Ask(slot, answer, [], [], [], []))
        elif mark in ("d", "i", "D", "I") and out:
            a = out[-1].asks[-1]
            {"d": a.direct, "i": a.indirect, "D": a.direct_held, "I": a.indirect_held}[mark].append(rest)
    return out


RELATIONS = _load_relations()
THIRD = [r for r in RELATIONS if not r.name.startswith("me_")]
FIRST = [r for r in RELATIONS if r.name.startswith("me_")]

FILLER = Wording("""
    [The weather|The food|The music|The day] was [good|bad|nice|fine|great].
    [Nobody|Everybody] [knows why|was there|came late|went home early].
    [It was|It is] [late|early|time to go|a long way|a good idea].
    It was a [sunny|rainy|windy|quiet|warm|cold] [day|morning|evening].
    [Everybody|Nobody|The whole town] [was happy|was surprised|talked about it|laughed].
    [That|This] was [nice|good|a surprise|not easy].
    The [birds|children|neighbours] were [singing|playing|busy].
    [Later|After that|In the evening], it [rained|got dark|was quiet].
    [There is not much more to tell.|It was a good year.|Life is good here.|Time goes by.]
    """, """
    A soft wind blew over the roofs.
    Nothing else happened that week.
    The evening bells could be heard far away.
    """)
TEXT_FIRST = Wording("""
    <t> <q>
    <t> <q>
    <t>¶<q>
    <t>¶¶<q>
    Text: <t>¶Question: <q>
    Text: <t> Question: <q>
    [Read|Read this|Here is a text|Here is a story|Look at this|This is the text|Listen|Story|Please read|The facts|My notes]: <t> <q>
    [Read|Read this|Here is a text|This is the text|Please read this text|Notes|Use this text]: <t>¶¶<q>
    "<t>" <q>
    [Read the text and answer|Answer from the text|Use the text to answer|Read and answer].¶<t>¶<q>
    [I read this|I heard this|Someone told me|I know this|It says here]: <t> <q>
    [Context|Information|Info|Data|Background|Given|Known|Message|Letter|News|Report|The story goes like this|Article|Diary|Here is what happened|I wrote this]: <t> [Question: |]<q>
    [Context|Information|Background|Given]: <t>¶[Question: |Q: |]<q>
    <t> [My question|The question|Question|Now answer|Now tell me|Based on this|From this text|So]: <q>
    [I have a text for you|Take this text|Study this text|Think about this|There is this text|In the newspaper I read this]. <t> <q>
    <t> [That was the text.|This is all I know.|That is the story.|End of text.|Now my question.|I have a question about this.|OK?] <q>
    <t>¶---¶<q>
    [Text|Story|Context]:¶<t>¶¶[Question|Q]:¶<q>
    [Here are some facts|Some facts|A few facts|Several facts|These facts are known|We know this]: <t> <q>
    """, """
    Here comes a passage. <t> Now then: <q>
    Passage: <t>¶¶Task: <q>
    Have a look at these lines: <t>¶<q>
    """)
TEXT_LAST = Wording("""
    <q> <t>
    <q>¶<t>
    <q>¶¶<t>
    <q> [Text|Here is the text|The text|Read this|The story|Look here]: <t>
    <q>¶Text: <t>
    Question: <q>¶Text: <t>
    [Answer this question|Please answer]: <q> [Here is the text|Text]: <t>
    [Answer|Tell me|I want to know]: <q> [You find it here|It is in this text|Here are the facts|Look at this|Information|Context]: <t>
    [I have a question|Question for you|Help me with this]. <q> <t>
    [Q|Question]: <q>¶[Context|Information|Text|Facts]: <t>
    <q> [I know only this|All I know is this|The text says|The story says|It says]: <t>
    """, """
    <q> You will find it in these lines: <t>
    Task: <q>¶Passage: <t>
    """)
UNKNOWN = "The text does not say that."


def passage(ctx):
    """Some facts of which several are of the same kind, so that only binding the right words helps."""
    rng = ctx.rng
    n = rng.choice((3, 4, 4, 5, 6) if STAGE > 3 and not ctx.held else (2, 3, 3, 4, 4, 5, 6) if STAGE > 1 and not ctx.held else (1, 2, 2, 3, 3, 4, 5))
    key = rng.choice(THIRD)
    facts = [(key, key.fill(ctx))]
    while len(facts) < n:
        r = key if ctx.chance(0.45) else rng.choice(THIRD)
        slots = r.fill(ctx)
        if r is not key and ctx.chance(0.3):  # the same person does two things
            people = [s[k] for q, s in facts for k, kind in q.slots.items() if kind == "name"]
            mine = [k for k, kind in r.slots.items() if kind == "name"]
            if people and mine and not any(q is r for q, _ in facts):
                slots[mine[0]] = rng.choice(people)
        facts.append((r, slots))
    rng.shuffle(facts)
    sentences = [r.state(ctx, s) for r, s in facts]
    if ctx.chance(0.2):
        sentences.insert(rng.randint(0, len(sentences)), FILLER.say(ctx))
    return facts, " ".join(sentences)


def unambiguous(fact, ask, facts):
    """Whether the words of the question (all slots but the asked one) point at one fact only."""
    r, slots = fact
    for other, s in facts:
        if s is slots:
            continue
        values = {v.lower() for v in s.values()}
        if any(v.lower() in values for k, v in slots.items() if k != ask.slot) and r.slots.keys() & other.slots.keys():
            if other is r:
                return False
    # These ask without naming anything, so a second fact of the kind makes them unanswerable.
    return True


def reading(ctx):
    rng = ctx.rng
    if ctx.chance(0.3):
        return earlier_turn(ctx)
    if ctx.chance(0.12):
        return story_reading(ctx)
    facts, text = passage(ctx)
    order = [f for f in facts]
    rng.shuffle(order)
    messages = []
    turns = 1 if ctx.held else rng.choice((2, 3, 4, 5, 6)) if STAGE > 3 else rng.choice((1, 2, 3, 4, 5)) if STAGE > 1 else rng.choice((1, 1, 2, 2, 3))
    check = {}
    for i in range(min(turns, len(order))):
        r, slots = order[i]
        q, a, value, ask = r.ask(ctx, slots)
        if not unambiguous((r, slots), ask, facts):
            continue
        if not messages:
            if not ctx.held and ctx.chance(0.04):
                absent = rng.choice([x for x in THIRD if x.slots.get("p") == "name" and all(x is not y for y, _ in facts)])
                q = absent.ask(ctx, absent.fill(ctx))[0]
                a = UNKNOWN
            frame = TEXT_LAST if ctx.chance(0.15) else TEXT_FIRST
            messages += [("user", frame.say(ctx, t=text, q=q)), ("assistant", a)]
        else:
            messages += [("user", q), ("assistant", a)]
        others = [v for f, s in facts for k, v in s.items() if s is not slots and f.slots[k] == r.slots[ask.slot] and v not in slots.values()]
        check = {"has": [value], "not": others}
    if not messages:
        return reading(ctx)
    return Dialogue("reading", messages, check)


REMEMBER = Wording("""
    [Please |]remember[:| this:| that] <s>
    [Keep|Please keep] in mind[:| that] <s>
    [Listen|Note|Just so you know|Here is something|By the way|FYI|Good to know|One thing]: <s>
    <s>
    <s> [Remember that.|Please remember it.|Keep that in mind.|Don't forget.|OK?|I will ask you later.]
    [I want to tell you something|Let me tell you something|I have some news]: <s>
    [Hear|Know|Learn|Save|Note down|Write down|Memorise] this: <s>
    [Do not forget|Never forget|Make a note|Think of this|It is important|Take note]: <s>
    <s> [That is important.|Save that.|Note that.|Do you understand?|Got it?|That is all.|Just so you know.|I told you.]
    [I heard|They say|People say|My friend says|I know|I found out|You must know|It is known] this: <s>
    [For later|First|Before we start|To begin with|Today's news]: <s>
    """, """
    Store this for later: <s>
    <s> Hold on to that.
    """)
ME_INTRO = Wording("""
    <s>
    <s>
    [Hello|Hi|Hey|Good morning|Good evening|Hi there|Hello there][!|.|,] <s>
    [Well|OK|So|You know|By the way], <s>
    <s> [What do you think?|Nice to meet you.|And you?|Just so you know.|Remember that.|How are you?]
    [Let me tell you about me|About me|Something about me|You should know]: <s>
    [Hello|Hi|Hey] [Corella|friend|you|everyone], <s>
    <s> [That is me.|That is all about me.|Got it?|OK?|Can you remember that?|Do not forget it.|Please keep that in mind.|Let us talk.]
    [First|To begin|Before we start|Actually|Did I tell you|Guess what|Do you know what|Here is something about me]: <s>
    [Nice to meet you|I am new here|Let us talk|I want to talk|How are you]. <s>
    """, """
    Greetings. <s>
    <s> That is my story so far.
    """)
NOTED = ["I will remember that.", "OK, I will remember that.", "Good to know.", "Thank you for telling me.", "All right."]
BETWEEN = ["talk", "sums", "facts", "lists"]


def earlier_turn(ctx):
    """A fact told in one turn and asked for in a later one."""
    rng = ctx.rng
    pool = FIRST if ctx.chance(0.65) else THIRD
    n = rng.choice((1, 1, 2, 3)) if pool is FIRST else rng.choice((1, 1, 2))
    chosen = rng.sample(pool, n)
    clash = {"me_hobby": "me_food", "me_put": "me_item"}
    chosen = [r for r in chosen if not any(clash.get(r.name) == x.name for x in chosen)]
    facts = [(r, r.fill(ctx)) for r in chosen]
    text = " ".join(r.state(ctx, s) for r, s in facts)
    frame = ME_INTRO if pool is FIRST else REMEMBER
    said = ragged(ctx, frame.say(ctx, s=text if frame is ME_INTRO or ctx.chance(1) else text))
    name = next((s["n"] for r, s in facts if r.name == "me_name"), None)
    noted = f"Nice to meet you, {name}!" if name else rng.choice(NOTED)
    messages = [("user", upper_first(said)), ("assistant", noted)]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        other = {"talk": talk_turn, "sums": sums_turn, "facts": facts_turn, "lists": lists_turn}[rng.choice(BETWEEN)]
        messages += other(ctx)[0]
    check = {}
    for r, slots in rng.sample(facts, 1 if ctx.held else rng.randint(1, len(facts))):
        q, a, value, ask = r.ask(ctx, slots)
        messages += [("user", q), ("assistant", a)]
        check = {"has": [value], "not": []}
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

STORY_FRAME = Wording("""
    [Tell|Write|Give] me a [short |little |nice |small |new |] [story|tale] <about>.
    [Please |][tell|write|make up|invent] a [short |little |nice |small |] [story|tale] <about>.
    [Can|Could|Would|Will] you [please |][tell|write|make up] [me |]a [short |little |] [story|tale] <about>?
    I [want|would like|need|wish for|would love] a [short |little |] [story|tale] <about>[, please|].
    [I'd like|I want] to [hear|read] a [short |] [story|tale] <about>.
    A [short |little |nice |] [story|tale] <about>[, please|].
    [Story|Tale] time! [Tell|Write] [me |][a story|one] <about>.
    [Do you know|Do you have|Have you got] a [story|tale] <about>?
    [My daughter|My son|My class|My friend|The child] [wants|needs|would like] a [story|tale] <about>.
    [Write|Tell] a few sentences <about>.
    [Start|Begin] a [story|tale] <about>.
    [Time for a bedtime story|It is bedtime]. [Tell|Write] [me |]a [story|tale] <about>.
    [Hello|Hi|Hey|OK|Well|Please], [tell me|write me|make up] a [story|tale] <about>.
    [Create|Produce|Imagine|Think up|Develop|Prepare|Design|Come on, write] a [short |little |lovely |funny |sweet |] [story|tale|adventure|fairy tale|bedtime story] <about>.
    [Can|Could|Would] you [think up|create|imagine|read me|give me|share|start] a [short |little |lovely |] [story|tale|fairy tale|adventure|bedtime story] <about>?
    [Surprise me|Make me happy|Delight me|Help me sleep|Amuse me] with a [short |little |] [story|tale|fairy tale] <about>.
    [How about|What about|Maybe] a [short |little |] [story|tale|fairy tale] <about>?
    [Let me|Let us] [hear|have|read|see] a [short |little |] [story|tale|text|adventure] <about>.
    [I am in the mood for|I am looking for|I feel like|I would be glad about|We need|We want] a [story|tale|fairy tale|short story] <about>.
    [Write|Invent|Make up|Tell|Produce] [something|something short|something nice|a few lines|some lines|a small text|a paragraph] <about>.
    [Story|Tale|Fairy tale|Bedtime story|Short story|Little story] <about>[.|, please.|!]
    [For my children|For a child|For school|For my little sister|For my homework|For tonight], [write|tell|make up] a [story|tale] <about>.
    [Your task|Task|Exercise]: [write|tell|invent] a [short |] [story|tale] <about>.
    [Be a storyteller|You are a writer|Act like an author|Be creative]: [write|tell] [me |]a [story|tale] <about>.
    [It should be|Make it|I wish for] a [little|short] [story|tale] <about>.
    [There must be|Is there] a [story|tale] <about>[?|, tell it.]
    """, """
    Please compose a brief narrative <about>.
    Entertain me with something made up <about>.
    Might I hear a bedtime tale <about>?
    Put together a tiny adventure <about>.
    """)
STORY_HERO = Wording("""
    about <hero>
    about <hero>
    with <hero>
    of <hero>
    [where|in which] the hero is <hero>
    [where|in which] <hero> is the hero
    with <hero> as the hero
    that is about <hero>
    in which <hero> has an adventure
    on <hero>
    around <hero>
    that tells of <hero>
    that stars <hero>
    featuring <hero>
    for <hero>
    that has <hero> in it
    whose hero is <hero>
    where <hero> does something great
    and its hero, <hero>,
    with <hero> as main [character|figure]
    about the life of <hero>
    about the adventures of <hero>
    """, """
    starring <hero>
    that follows <hero>
    """)
STORY_PLACE = Wording("""
    in a <l>
    in the <l>
    near a <l>
    in a <l>
    that [happens|plays|takes place] in a <l>
    set in a <l>
    at a <l>
    inside a <l>
    close to a <l>
    somewhere in a <l>
    which [happens|takes place|begins|starts] in a <l>
    with a <l> in it
    with a <l>
    that [begins|starts|ends] [in|at|near] a <l>
    that leads to a <l>
    [the place is|everything happens in] a <l>
    """, """
    with a <l> as the scene
    unfolding at some <l>
    """)
STORY_WORDS = Wording("""
    with <w>
    with the [words|things] <w>
    that [has|uses|contains|includes] [the words |the things |]<w>
    [using|and use] the words <w>
    and [<w>|with <w>]
    with the following [words|things|objects]: <w>
    in which <w> [appear|occur|come up|play a part|are used]
    that mentions <w>
    that includes <w> [somewhere|]
    where you use <w>
    where <w> [appear|play a role|can be found]
    containing <w>
    including <w>
    made from the words <w>
    plus <w>
    """, """
    featuring the terms <w>
    into which you work <w>
    """)
STORY_ASIDE = Wording("""
    Use [the words |these words: |the things |]<w>.
    [Please use|It should have|It must contain|Include|Also use|Put in|Do not forget|There should be|Add|Mention] [the words |]<w>.
    The words are <w>.
    [Words|Things|Words to use|Use these]: <w>.
    [I want to see|Make sure to use|It needs|Let there be] <w>[ in it|].
    [These words|These things|The following words|The words below] [should|must|have to] [appear|be in it|be used|occur]: <w>.
    [Work in|Weave in|Bring in|Use all of|Try to use|Remember to use|Be sure to include|Let me see] <w>.
    <w> [should|must|have to] be in it.
    <w> [should|must|have to] [appear|occur|come up|turn up][ in the story| in it|].
    [It|The story|The tale] [should|must|has to] [have|contain|mention|include|use] <w>.
    [Required words|Key words|Keywords|Objects|My words|Needed]: <w>.
    [Give a role to|Do something with|Say something about|Do not leave out] <w>.
    """, """
    See that <w> turn up somewhere.
    The following have to occur: <w>.
    """)


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
    kind = rng.choice(KIND_HELD if ctx.held else KIND) if not ctx.chance(0.4 if STAGE > 2 and not ctx.held else 0.1) else ctx.word("animal")
    she = kind in SHE or (kind not in HE and ctx.chance(0.5))
    return {"h": ctx.word("name"), "k": kind, "tr": ctx.word("trait") if STAGE > 2 and not ctx.held else ctx.listed("trait"), "l": ctx.word("place"), "f": ctx.word("name"),
            "k2": rng.choice([k for k in KIND if k != kind]), "she": she, "things": [ctx.word("object") for _ in range(n_things)]}


def story_text(ctx, p, plain=False):
    rng = ctx.rng

    def line(lines, **more):
        text = rng.choice(lines)
        mine, other = (0, 1) if p["she"] else (1, 0)
        for pair in (("She", "He"), ("she", "he"), ("her", "him"), ("Her", "His")):
            text = text.replace(f"[{pair[0]}|{pair[1]}]", pair[mine])
        return upper_first(expand(rng, text, {**p, **more}))

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
    r = rng.random()
    if r < 0.75:
        style = rng.random()
        if style < 0.4:
            hero = expand(rng, f"a [<tr> |]<k> [called|named] <h>" if not ctx.new else "a <k> by the name of <h>", p)
            asked += [p["h"], p["k"]]
        elif style < 0.6:
            hero = expand(rng, "<h>[ the <k>|, a <k>]", p)
            asked += [p["h"], p["k"]]
        elif style < 0.8:
            hero = p["h"]
            asked += [p["h"]]
        else:
            hero = expand(rng, "a <tr> <k>", p)
            asked += [p["tr"], p["k"]]
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
            if len(about) == 1:
                about = [rng.choice(["about ", "with ", "about "]) + w] if not ctx.new else ["around " + w]
    if not use and not ctx.held:
        p["things"] = p["things"][:2]
    request = upper_first(STORY_FRAME.say(ctx, about=" ".join(about))) + tail
    return Dialogue("story", [("user", ragged(ctx, request)), ("assistant", story_text(ctx, p))], {"words": asked})


STORY_ASKS = [
    ("h", "The hero is called <h>.", ["who is the story about", "what is the name of the <k>", "what is the hero called",
                                     "who is the hero", "what is the <k> called"],
     ["the name of the hero", "who the story is about", "what the <k> is called"],
     ["which figure stands at the centre of it"], ["how the main figure is named"]),
    ("k", "<h> is a <k>.", ["what is <h>", "what kind of hero is <h>", "who is <h>"], ["what <h> is", "who <h> is"],
     ["as what does <h> appear"], ["what kind of being <h> is"]),
    ("l", "<h> is in the <l>.", ["where does <h> live", "where is <h>", "where does the story [happen|take place]"],
     ["where <h> lives", "where the story happens", "the place of the story"],
     ["what is the scene of it all"], ["in what surroundings <h> moves"]),
]


def story_reading(ctx):
    p = story_parts(ctx, 2)
    text = story_text(ctx, p)
    slot, answer, d, i, dh, ih = ctx.rng.choice(STORY_ASKS)
    q = question(ctx, dh if ctx.new else d, ih if ctx.new else i, p)
    frame = TEXT_FIRST
    return Dialogue("reading", [("user", frame.say(ctx, t=text, q=q)), ("assistant", expand(ctx.rng, answer, p))],
                    {"has": [p[slot]], "not": [p["f"]] if slot == "h" else []})


# ---------------------------------------------------------------- sums

ADD = Wording("""
    <a> + <b>
    <a>+<b>
    <a> + <b> =
    <a>+<b>=?
    <a> + <b> = ?
    [What|How much] is <a> [+|plus|and] <b>?
    [Add|Please add] <a> [and|to|+] <b>.
    [Calculate|Compute|Work out|Solve|Please calculate|Sum up] <a> [+|plus] <b>.
    [What|How much] do you get [for|with] <a> [+|plus] <b>?
    [Tell me|Give me|Find|I need|What is] the sum of <a> and <b>.
    [Can|Could] you [add|sum up] <a> and <b>?
    [Can|Could] you [tell me|work out|calculate] [what |]<a> plus <b>[ is|]?
    [Sum|Task|Problem|Maths|Quick]: <a> + <b>
    [Do you know|Tell me] what <a> [plus|+] <b> is[.|?]
    <a> plus <b>
    <a> plus <b>[ is what| makes what| equals]?
    [What does|How much does] <a> [plus|and] <b> make?
    I have <a> and [get|add] <b>. [How many|How much] is that?
    [How big|How large] is the sum of <a> and <b>?
    [Total|The total|Sum|The sum] of <a> and <b>[?|, please.|]
    [What is|Give me|Find|Tell me] the total of <a> and <b>[.|?]
    [What|How much] [will|would] [I|we|you] [get|have] if [I|we|you] add <b> to <a>?
    [What happens|What comes out|What is the result] if [I|you] [add|put] <b> to <a>?
    [Take|Start with] <a> [and|, then] add <b>[.|. What do you get?|. How much is it?]
    [The result of|Result of|Answer of] <a> [+|plus] <b>?
    [Do|Solve|Calculate|Check] this [sum|task|for me]: <a> + <b>[.|]
    [Help me|I must|I want to|Please] [add|sum up|calculate] <a> [and|plus|+] <b>.
    [Let us|We must] [add|count] <a> and <b>.
    <a> and <b> [together|in total|in all|make]?
    <a> [+|plus] <b>, [please|how much is that|what is it|quickly]?
    [In maths class|At school|In my homework] I have <a> + <b>. [What is it?|How much is that?|Help me.]
    [Combine|Count together] <a> and <b>.
    [First|We have|There are] <a>, then <b> [come|are added|more]. How many [in all|together|is that]?
    Increase <a> by <b>.
    <a> is increased by <b>. [What is the result?|What now?]
    [Can|Could|Would] you [find|give me|do|solve] <a> [+|plus] <b>[ for me|]?
    """, """
    Put <a> and <b> together: what comes out?
    Let me have the total of <a> and <b>.
    If I raise <a> by <b>, where do I land?
    Evaluate <a> + <b> for me.
    """)
SUB = Wording("""
    <a> - <b>
    <a>-<b>
    <a> - <b> =
    <a>-<b>=?
    [What|How much] is <a> [-|minus] <b>?
    [Subtract|Take|Please subtract] <b> from <a>.
    [Calculate|Compute|Work out|Solve] <a> [-|minus] <b>.
    [What|How much] do you get for <a> minus <b>?
    [Tell me|Give me|Find] the difference of <a> and <b>.
    [Can|Could] you [tell me|work out|calculate] <a> minus <b>?
    <a> minus <b>
    [Take away|Take] <b> from <a>. What is left?
    [Total|Result|The result] of <a> minus <b>?
    [What|How much] [is left|remains|do I have] if [I|you|we] take <b> [from|away from] <a>?
    [Start with|Begin with] <a> and [take away|subtract|remove] <b>.
    [Remove|Deduct] <b> from <a>.
    [Do|Solve|Calculate] this: <a> - <b>
    <a> without <b>?
    <a> less <b>
    Decrease <a> by <b>.
    [The difference between|Difference of] <a> and <b>[?|, please.]
    How much more is <a> than <b>?
    """, """
    If I lower <a> by <b>, where do I land?
    What remains of <a> once <b> is gone?
    """)
MUL = Wording("""
    <a> * <b>
    <a> x <b>
    [What|How much] is <a> [*|times|x] <b>?
    [Multiply|Please multiply] <a> [by|and|with] <b>.
    [Calculate|Compute|Work out|Solve] <a> [*|times] <b>.
    [Tell me|Give me|Find] the product of <a> and <b>.
    <a> times <b>
    [How much|What] do you get for <a> times <b>?
    [Do|Solve|Calculate] this: <a> * <b>
    <a> multiplied by <b>
    [Can|Could] you multiply <a> by <b>?
    [The product of|Product of] <a> and <b>?
    <b> times the number <a>
    """, """
    What comes of <a> taken <b> times?
    """)
WORD_ADD = Wording("""
    <p> has <a> <o> and [gets|buys|finds] <b> more. How many <o> [does <p> have|are there] now?
    There are <a> <o> on the [table|left|shelf] and <b> <o> on the [floor|right|chair]. How many <o> [are there|is that] [in all|together]?
    <p> has <a> <o>, and <q> has <b> <o>. How many [<o> |]do they have together?
    I have <a> <o> and [buy|get|find] <b> more. How many <o> do I have?
    <p> [bought|found|collected|counted|picked|made] <a> <o> and then <b> more. How many <o> [is that|are there|does <p> have]?
    [First|In the morning] <p> had <a> <o>. [Then|Later|In the evening] <q> brought <b>. How many <o> are there [now|in total]?
    A [box|bag|basket|room] holds <a> <o>, another one holds <b>. How many <o> [in total|together|are there]?
    <a> <o> and <b> <o>: how many [is that|together|in all]?
    If <p> [gives|sends] me <b> <o> and I have <a>, how many do I have?
    """, """
    <p> picks <a> <o> before lunch and another <b> after it. What is the total?
    To <a> <o>, somebody adds <b> more. What is the new number of <o>?
    """)
WORD_SUB = Wording("""
    <p> has <a> <o> and [eats|loses|sells|gives away] <b>. How many <o> are left?
    There are <a> <o>. <p> takes <b> [of them|away]. How many <o> [remain|are left]?
    I have <a> <o> and [eat|lose|sell] <b>. How many <o> do I have left?
    <p> had <a> <o>. <q> took <b>. How many <o> [are left|does <p> have now|remain]?
    From <a> <o>, <b> [are eaten|are sold|get lost]. How many [are left|remain]?
    A box holds <a> <o>. [I|We] take out <b>. How many are [still there|left]?
    """, """
    Out of <a> <o>, <b> are gone. What remains?
    """)


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


DRILL = ["Work out <x>.", "<x>", "Calculate: <x>", "Solve these: <x>", "[Please |]solve <x>.", "What is <x>?", "Sums: <x>", "Do these sums: <x>",
         "[Can|Could] you [solve|calculate|work out] <x>?", "My homework: <x>"]


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
    text = expand(rng, rng.choice(DRILL), {"x": joined(ctx, asked)})
    return Dialogue("sums", [("user", upper_first(text)), ("assistant", " ".join(replies))])


def sums(ctx):
    if STAGE > 1 and not ctx.held and ctx.chance(0.4):
        return drill(ctx)
    messages, check = sums_turn(ctx, graded=ctx.held)
    if not ctx.held:
        for _ in range(ctx.rng.choice((0, 1, 2, 3, 4))):
            more, check = sums_turn(ctx)
            messages += more
    return Dialogue("sums", messages, check)


# ---------------------------------------------------------------- JSON

FIELDS = {
    "name": "name", "first_name": "name", "owner": "name", "author": "name", "friend": "name", "hero": "name",
    "city": "town", "town": "town", "home": "town", "from": "town", "to": "town", "place": "place",
    "age": "age", "price": "price", "count": "count", "number": "count", "size": "count", "weight": "price", "year": "year",
    "colour": "colour", "color": "colour", "animal": "animal", "pet": "animal", "food": "food", "drink": "drink",
    "job": "job", "hobby": "hobby", "item": "object", "object": "object", "title": "title", "thing": "object",
    "material": "material", "day": "day", "month": "month", "instrument": "instrument", "vehicle": "vehicle",
    "subject": "subject", "code": "code", "id": "year", "event": "event", "shop": "shop", "weather": "weather",
    "person": "name", "location": "town", "creature": "animal", "dish": "food", "work": "job",
    "cost": "price", "date": "day", "time": "hour", "kind": "object", "last_name": "name",
    "street": "title", "user": "name", "level": "count", "key": "code", "type": "object", "status": "madeval", "group": "title",
    "open": "bool", "happy": "bool", "new": "bool", "ready": "bool", "points": "price", "team": "title", "ship": "title",
}
FIELDS_HELD = {"nickname": "name", "village": "town", "amount": "count", "tool": "object", "shade": "colour", "meal": "food",
               "trade": "job", "pastime": "hobby", "rank": "age", "mascot": "animal", "label": "title", "active": "bool"}

JSON_PAIRS = Wording("""
    [Write|Give me|Make|Create|Build|Return|Show me|Produce] [a JSON object|JSON|an object in JSON] with <d>.
    [Write|Give me|Make|Create|Build|Return|Show me] [a JSON object|JSON|some JSON] for this: <d>.
    [Please |][turn|convert|change|put] this into [JSON|a JSON object|JSON form]: <d>.
    [Please |][write|put|show|return|save] this [as|in] JSON: <d>.
    [Can|Could|Would] you [please |][write|make|give me] [JSON|a JSON object] [with|from|for|of] <d>?
    [Can|Could] you [turn|convert|put] this into JSON: <d>?
    I [need|want|would like] [JSON|a JSON object] with <d>[, please|].
    <d>. [As JSON|In JSON|As JSON, please|Please write that as JSON|Make JSON from that|Now as a JSON object|Give me that as JSON].
    <d>. [Turn|Convert|Put|Write|Make] [this|that|it] [into|as] JSON.
    [JSON|JSON, please|As JSON|In JSON]: <d>
    [Data|Here is my data|Input|Record]: <d>. [Output|Answer|Reply|Write it] [as|in|with] JSON.
    [Answer|Reply] [only |][in|with|as] JSON: <d>.
    [Format|Express|Store|Note|Record|Print|Output|Send] [this|the following|these data|these values|it] [as|in] JSON: <d>.
    [I have|There is|Here is|We have] [this|the following|some data]: <d>. [Format|Express|Write|Output|Print|Return] it [as|in] JSON.
    [A JSON object|JSON object|A small JSON object|One JSON object] [with|for|of] <d>[, please|].
    [Build|Form|Construct|Generate|Prepare|Compose|Fill] [a JSON object|a JSON record|JSON data|JSON text|a JSON file] [with|from|using|out of] <d>.
    [Can|Could|Would] you [format|express|return|output|generate|build|store] [this|the following] [as|in] JSON: <d>?
    [How does|What does] this look [like |]in JSON: <d>?
    [How would|How do] you write <d> [in|as] JSON?
    [The answer|The output|Your answer|The result] [should|must|has to] be JSON: <d>.
    <d>: [make|write|build|give me] [a |one ][JSON object|JSON record].
    [My app|The computer|My script|The system|Our tool|The robot] [needs|wants|reads|likes|takes] JSON[. The data|. The values|. The fields|]: <d>.
    [My app|The computer|My script] [needs|wants] a JSON object with <d>.
    [Make|Write|Create] [a JSON object|JSON] where <d>.
    [Let|Set] <d>. [Show|Write|Return] [the object|that] [as|in] JSON.
    [Use JSON|Only JSON|JSON only|Nothing but JSON|Just JSON|Valid JSON|JSON format]: <d>.
    """, """
    Represent the following as a JSON document: <d>.
    My program expects JSON. The content is <d>.
    <d>. Encode these details in JSON format.
    Kindly serialise this for me (JSON): <d>.
    """)
JSON_EXTRACT = Wording("""
    [Extract|Get|Find|Take] [the |]<k> [from|out of] [this|the] [text|sentence] [as|in|and return] JSON: <t>
    <t> [Write|Give me|Return|Put] [the |]<k> [as|in] JSON.
    <t>¶[Extract|Give me|Return|Write] [the |]<k> as JSON.
    [Read|Text|Read this|Look at this]: <t> [Return|Write|Give me] JSON with [the keys |the fields |]<k>.
    [Return|Write|Give me|Make] JSON with [the keys |the fields |]<k> [for|from] this text: <t>
    [JSON with|As JSON with|Use the keys] <k>[, please|]: <t>
    <t> [JSON with|As JSON with|Please make JSON with|Make a JSON object with] [the keys |]<k>[, please|].
    [Fill|Make] a JSON object with [the keys |]<k>. [Text|Here is the text]: <t>
    [Find|Read out|Pick|Collect|Give me|Fetch|Show] [the |]<k> [from|in|of] [this|the following] [text|sentence|line|message|note], [as|in] JSON: <t>
    <t> [Find|Pick|Collect|Output|Show|Tell me|I need|I want] [the |]<k> [as|in] [JSON|a JSON object|JSON format].
    [Text|Message|Note|Input|Sentence]: <t>¶[Keys|Fields|Wanted]: <k>¶[JSON:|As JSON.|Answer in JSON.|Output JSON.]
    [Here is a text|Look here|I read|It says|Given]: <t> [Build|Make|Create|Generate|Print] [a JSON object|JSON] with <k>.
    [Summarise|Store|Save|Write|Put] this [as|in] JSON with [the keys |the fields |]<k>: <t>
    [From|Out of] [this|the] [text|sentence] [take|make|build|write] JSON with <k>: <t>
    <t> [My app|The computer|My script] [needs|wants] JSON with [the keys |the fields |]<k>.
    [A JSON object|JSON] with [keys |fields |]<k> [for|about] this: <t>
    [What are|What is] [the |]<k> here? [Answer|Reply] in JSON. <t>
    """, """
    Pull <k> from the passage and encode them in JSON. <t>
    <t> My program expects a JSON document holding <k>.
    """)
JSON_LIST = Wording("""
    [Write|Give me|Make|Create|Return] [a JSON list|a JSON array|an array in JSON] [of|with|from] <w>.
    [Put|Turn|Convert] <w> into a JSON [list|array].
    <w>. [As a JSON list|Make a JSON list of that|Write it as a JSON array|JSON list, please].
    [I need|I want] a JSON [list|array] [of|with] <w>.
    [Please |][write|show] [these|the words] as a JSON [list|array]: <w>.
    [JSON list|JSON array|As a JSON array|As a JSON list]: <w>
    [Can|Could] you [make|write] a JSON [list|array] [from|of] <w>?
    [Format|Express|Store|Output|Print|Save] [this|these|the words|the following] as a JSON [array|list]: <w>.
    [How does|How do] <w> look as a JSON [array|list]?
    [My app|The computer|My script] [needs|wants|reads] a JSON [array|list]: <w>.
    <w>: [as a JSON array|as a JSON list|make a JSON array|JSON array, please].
    [Build|Form|Generate|Construct|Fill] a JSON [array|list] [with|from|of|out of] <w>.
    [The items|The elements|The entries|The values] are <w>. [Make|Write|Return] a JSON [array|list].
    [Use|Take] <w> and [make|build|write] a JSON [list|array].
    [Answer|Reply] with a JSON [list|array]: <w>.
    [A list|An array] of <w> in JSON[, please|].
    """, """
    Represent <w> as an array in JSON format.
    My program expects a JSON sequence: <w>.
    """)
PAIR_STYLE = ["<k> <v>", "<k> <v>", "<k>: <v>", "<k> = <v>", "<k> is <v>", "the <k> is <v>", "the <k> <v>", "<k>=<v>", "<k> \"<v>\"",
              "<k> - <v>", "<k> [equals|equal to|set to|should be|must be|has the value] <v>", "the <k> should be <v>", "<v> for <k>", "<v> for the <k>",
              "<v> (<k>)", "<v> is the <k>", "a <k> of <v>", "the value <v> for <k>", "key <k>, value <v>", "<k> (<v>)", "<k>:<v>", "\"<k>\": \"<v>\"", "<k> / <v>", "<v> under <k>"]
PAIR_STYLE_HELD = ["<k> being <v>", "<v> as <k>", "<k> -> <v>"]


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
KEY_OF = {"name": ["name", "name", "person", "who", "first_name"], "town": ["city", "town", "home", "location", "place", "where"],
          "animal": ["animal", "pet", "creature", "kind"], "colour": ["colour", "color", "shade"],
          "object": ["item", "object", "thing", "article", "what"], "food": ["food", "meal", "dish"], "job": ["job", "work", "profession"],
          "age": ["age", "years"], "count": ["count", "number", "amount", "how_many"], "shop": ["shop", "place", "store"],
          "vehicle": ["vehicle", "transport"], "instrument": ["instrument"], "hobby": ["hobby", "pastime"], "price": ["price", "coins", "cost"],
          "material": ["material"], "event": ["event"], "day": ["day"], "hour": ["time", "hour"], "weather": ["weather"],
          "subject": ["subject"], "drink": ["drink"]}
KEY_OF_HELD = {"name": ["full name"], "town": ["home town"], "animal": ["kind of animal"], "colour": ["the_colour"], "object": ["object_name"],
               "food": ["best food"], "job": ["kind of work"], "age": ["age_in_years"], "count": ["how many"], "price": ["price in coins"]}


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
        if ctx.chance(0.1):
            rel = [r for r in EXTRACT if r.name == "gave"][0]
            slots = rel.fill(ctx)
            keys = {"p": "from", "o": "item", "q": "to"}
        else:
            rel = rng.choice([r for r in EXTRACT if r.name != "gave"])
            slots = rel.fill(ctx)
            table = KEY_OF_HELD if ctx.new else KEY_OF
            keys = {s: rng.choice(table.get(kind) or KEY_OF[kind]) for s, kind in rel.slots.items() if kind in KEY_OF}
            if rel.name == "pet":
                keys = {"p": "owner", "a": "animal", "n": "name"} if not ctx.new else {"p": "keeper", "a": "creature", "n": "petname"}
        if STAGE > 1 and not ctx.held:
            keys = {s: odd_key(ctx, k) if ctx.chance(0.4 if STAGE > 3 else 0.2) else k for s, k in keys.items()}
        order = list(keys)
        rng.shuffle(order)
        order = order[:rng.randint(2, 3)]
        sentences = [rel.state(ctx, slots)]
        if ctx.chance(0.2):
            sentences.insert(rng.randint(0, 1), FILLER.say(ctx))
        value = {keys[s]: int(slots[s]) if slots[s].isdigit() else slots[s] for s in order}
        names = [keys[s] for s in order]
        return JSON_EXTRACT.sentence(ctx, k=joined(ctx, names), t=" ".join(sentences)), value
    fields = FIELDS_HELD if ctx.new else FIELDS
    n = rng.choice((1, 2, 2, 3, 3, 4, 5))
    value = {}
    for key in rng.sample(list(fields), n):
        if ctx.chance(0.3):
            k = ctx.word("madekey")
            value[k] = rng.randint(0, 99) if ctx.chance(0.25) else ctx.word(rng.choice(["madeval", "name", "town", "object"]))
        else:
            value[key] = json_value(ctx, fields[key])
    styles = PAIR_STYLE_HELD if ctx.new else PAIR_STYLE
    style = rng.choice(styles)
    if STAGE > 1 and not ctx.held and ctx.chance(0.15):
        style = rng.choice([f"<k> {made_up(rng, False)} <v>", f"<k> {rng.choice(STRANGE)} <v>", "<k> => <v>", "<k> ~ <v>", "<k> :: <v>", "<k> >> <v>",
                            "<k>, <v>", "<v> goes to <k>", "<v> belongs to <k>", "<v> in <k>", "<v> in the field <k>", "<v> (that is the <k>)"])
    pairs = [expand(rng, style, {"k": k, "v": shown(v)}) for k, v in value.items()]
    if ctx.chance(0.2):
        data = rng.choice(["; ", ", ", "\n"]).join(pairs)
    else:
        data = joined(ctx, pairs)
    return JSON_PAIRS.sentence(ctx, d=data), value


def json_skill(ctx):
    messages = []
    for _ in range(1 if ctx.held else ctx.rng.choice((2, 3, 4) if STAGE > 3 else (1, 1, 1, 2, 3))):
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
LIST_ORDERED = Wording("""
    [List|Name|Give me|Tell me|Write down|Write|Show me|Say] <x>[.|, please.]
    [Please |][list|name|write down|give me|tell me] <x>.
    What are <x>?
    [Can|Could|Would] you [list|name|tell me|write down|say] <x>?
    [I want|I need|I would like] [to know |a list of |to see ]<x>.
    [A list of|Make a list of|Give me a list of|Write a list of] <x>[, please|].
    [Which|What] are <x>[, in order|]?
    [Do you know|Tell me about|List all of] <x>[.|?]
    <x>[, please|]
    [Do you remember|Do you know|Can you recall|Can you repeat] <x>?
    [I forgot|I cannot remember|I am learning|My child learns|We learn|Teach me] <x>. [Can you list them?|Help me.|Please list them.|Tell me.]
    [Show|Give|Present|Print|Offer|Bring] [me |us |][a list with |the list of |]<x>.
    [Count|Go through|Repeat|Read out|Put down|Note|Mention] <x>.
    [How do|In what order do] <x> go?
    [Tell me|Say] all of <x>[ in order| in the right order|].
    <x> [in order|as a list|in a list][, please|].
    [All|List:|A list:|In order:|The list of] <x>.
    [What is the order of|What is the list of|What belongs to] <x>?
    [Could|Would] you [please |][count|go through|repeat|show] <x>?
    """, """
    Recite <x> for me.
    Enumerate <x>.
    Run through <x>, one after another.
    """)
LIST_COUNTED = Wording("""
    [List|Name|Give me|Tell me|Write down|Show me|Say] <n> <x>[.|, please.]
    [Please |][list|name|write down|give me|tell me|think of] <n> <x>.
    What are <n> <x>?
    [Can|Could|Would] you [list|name|tell me|write down|think of] <n> <x>?
    [I want|I need|I would like] <n> <x>[, please|].
    [A list of|Make a list of|Give me a list of|Write a list of|I want a list of] <n> <x>[, please|].
    <n> <x>, please.
    [Do you know|Can you think of] <n> <x>?
    [Find|Collect|Choose|Pick|Present|Print|Mention|Think of|Suggest|Offer|State] <n> <x>[.| for me.| as a list.]
    [Do you have|Have you got|Are there] <n> <x> [for me|]?
    [I am looking for|I have to know|My child needs|For school I need|We need|Help me find|Teach me] <n> <x>.
    [Could|Would|Will] you [please |][find|choose|pick|collect|suggest|mention|give me] <n> <x>?
    <n> [examples of|] <x>[.|, as a list.|!]
    [Tell me|Give me|Show me] [the names of |] <n> <x>[.| that you know.]
    [Which|What] <n> <x> [do you know|can you name|can you think of|would you choose]?
    [Let us|Let me] [have|see|hear] <n> <x>.
    [List:|Task:|A list:] <n> <x>
    """, """
    Enumerate <n> <x>.
    Come up with <n> <x> for me.
    Which <n> <x> spring to mind?
    """)
LIST_COPY = Wording("""
    [Make|Write|Give me] a [numbered |]list [of|from|with] [this|these|the words|these words]: <w>.
    [Put|Write|Turn] [this|these|these words|the words] into a [numbered |]list: <w>.
    [Put|Turn] <w> into a [numbered |]list.
    [Make|Write|I need|I want] a [numbered |]list [of|with|from] <w>.
    <w>. [Make|Write] a list[ of that|], please.
    [Number|Please number] these[ words| things|]: <w>.
    [My shopping list|To buy|We need|Things to pack]: <w>. [Make a list.|Please write a list.|Write it as a list.]
    [Can|Could] you [make|write] a list [of|with|from] <w>?
    [Format|Print|Show|Order|Note down|Write down|Present|Output] [this|these|the following|these words|these things] as a [numbered |]list: <w>.
    <w>. [Number them.|As a list.|Make it a list.|List them.|In a list.|Put them in a list.|List these, please.]
    [We have|There are|I bought|I packed|I see|Let us take|I need] <w>. [Make|Write|Show] [me |]a [numbered |]list.
    [Create|Prepare|Build|Form|Print] a [numbered |]list [of|from|with|out of] <w>.
    [List|Number|List the following|List the words|Number the things]: <w>.
    [The items|The names|The words|The things] are <w>. [Number them.|List them.|Make a list.]
    [Can|Could|Would] you [list|number] [these|this|the following]: <w>?
    [Each on its own line|One per line|Line by line]: <w>.
    """, """
    Arrange <w> one below the other.
    Itemise the following: <w>.
    """)


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


def _facts():
    """(direct questions, indirect ones, answer, the word that counts, held-out direct, held-out indirect)"""
    out = []
    table = lambda s: [row.split() for row in s.replace("\n", "").split(";")]
    for land, town in table(CAPITALS):
        out.append(([f"what is the capital of {land}", f"which city is the capital of {land}", f"what is {land}'s capital", f"what city is the capital of {land}"],
                    [f"the capital of {land}", f"what the capital of {land} is", f"{land}'s capital"],
                    f"The capital of {land} is {town}.", town, [f"from which city is {land} governed"], [f"which town serves {land} as its capital"]))
        out.append(([f"{town} is the capital of [which|what] country", f"of [which|what] country is {town} the capital"], [f"which country has {town} as its capital"],
                    f"{town} is the capital of {land}.", land, [f"which country is governed from {town}"], [f"what country has its capital in {town}"]))
    for a, n in table(LEGS):
        out.append(([f"how many legs does a {a} have", f"how many legs has a {a}", f"how many legs do {a}s have"], [f"how many legs a {a} has", f"the number of legs of a {a}"],
                    f"A {a} has {n} legs.", n, [f"on how many legs does a {a} go"], [f"the count of legs on a {a}"]))
    for a, s in table(SOUNDS):
        out.append(([f"what sound does a {a} make", f"what does a {a} do to make noise", f"what noise does a {a} make", f"how does a {a} sound"], [f"what sound a {a} makes", f"the sound of a {a}"],
                    f"A {a} {s}.", s, [f"what can you hear from a {a}"], [f"what one hears from a {a}"]))
    for a, b in table(BABIES):
        out.append(([f"what is a baby {a} called", f"what is the name for a young {a}", f"what do you call a baby {a}"], [f"the name of a baby {a}", f"what a baby {a} is called"],
                    f"A baby {a} is called a {b}.", b, [f"which word names the young of a {a}"], [f"the word for the young of a {a}"]))
    for row in table(COLOURS):
        *a, c = row
        a = " ".join(a)
        out.append(([f"what colour is {a}", f"which colour is {a}", f"what is the colour of {a}", f"what colour does {a} have"], [f"the colour of {a}", f"what colour {a} is"],
                    f"{upper_first(a)} is {c}.", c, [f"in which colour do we see {a}"], [f"the usual colour of {a}"]))
    for pair_ in table(OPPOSITES):
        for x, y in (pair_, pair_[::-1]):
            out.append(([f"what is the opposite of {x}", f"what is the opposite to {x}", f"which word is the opposite of {x}"], [f"the opposite of {x}", f"the word that is the opposite of {x}"],
                        f"The opposite of {x} is {y}.", y, [f"which word means the reverse of {x}"], [f"what stands against {x}"]))
    for what, where, n in table(COUNTS):
        where = where.replace("_", " ")
        out.append(([f"how many {what} are [in|there in|on] a {where}", f"how many {what} does a {where} have", f"how many {what} has a {where}"], [f"how many {what} a {where} has", f"the number of {what} in a {where}"],
                    f"A {where} has {n} {what}.", n, [f"of how many {what} does one {where} consist"], [f"the count of {what} per {where}"]))
    for a, h in table(HOMES):
        out.append(([f"where does a {a} live", f"where do {a}s live", f"what is the home of a {a}"], [f"where a {a} lives", f"the home of a {a}"],
                    f"A {a} lives in a {h}." if h != "water" else "A fish lives in water.", h, [f"in what does a {a} dwell"], [f"the dwelling of a {a}"]))
    for row in table(MAKES):
        *a, j = row
        a = " ".join(a)
        out.append(([f"who makes {a}", f"[who|which person] can make {a}"], [f"who makes {a}", f"who can make {a}"], f"A {j} makes {a}.", j,
                    [f"from whose hands does {a} come"], [f"whose work {a} is"]))
    for names, order in (("day", LISTS["day"][0]), ("month", LISTS["month"][0])):
        for i, x in enumerate(order):
            nxt = order[(i + 1) % len(order)]
            out.append(([f"[what|which] {names} comes after {x}", f"what {names} is after {x}", f"what comes after {x}", f"what is the {names} after {x}"], [f"the {names} after {x}", f"what comes after {x}"],
                        f"After {x} comes {nxt}.", nxt, [f"which {names} follows upon {x}"], [f"the follower of {x}"]))
            out.append(([f"[what|which] {names} comes before {nxt}", f"what {names} is before {nxt}", f"what comes before {nxt}"], [f"the {names} before {nxt}", f"what comes before {nxt}"],
                        f"Before {nxt} comes {x}.", x, [f"which {names} leads up to {nxt}"], [f"the forerunner of {nxt}"]))
    return out


FACTS = _facts()


def facts_turn(ctx):
    d, i, answer, value, dh, ih = ctx.rng.choice(FACTS)
    q = question(ctx, dh if ctx.new else d, ih if ctx.new else i, {})
    return [("user", q), ("assistant", re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", answer))], {"has": [value], "not": []}


def facts(ctx):
    messages, check = facts_turn(ctx)
    for _ in range(0 if ctx.held else ctx.rng.choice((0, 1, 2))):
        more, check = facts_turn(ctx)
        messages += more
    return Dialogue("facts", messages, check)


# ---------------------------------------------------------------- talk

SORRY = "I am sorry, I cannot help with that. I am a small model: I can tell stories, answer questions about a text, do small sums, make lists and write JSON."
ABOUT = "I am Corella Nano, a very small language model. I can tell stories, answer questions about a text, do small sums, make lists and write JSON."

TALK = [
    (Wording("""
        [Hello|Hi|Hey|Hi there|Hello there|Hey there|Good day|Greetings friend|Hello Corella|Hi Corella][!|.|]
        [Good morning|Good evening|Good afternoon][!|.|]
        [Hello|Hi|Hey], [is anybody there|are you there|can you hear me]?
        """, """
        Howdy, partner!
        Salutations!
        """), ["Hello! How can I help you?", "Hi! What can I do for you?", "Hello! Nice to hear from you."]),
    (Wording("""
        How are you[ today| doing|]?
        [Hello|Hi|Hey|Good morning][!|,|.] [how are you|how are you doing|how do you do|how is it going][ today|]?
        [How do you do|How is it going|How are things|How do you feel|Are you well|Are you OK|What is up][ today|]?
        """, """
        Is everything fine with you?
        And how have you been lately?
        """), ["I am fine, thank you. How are you?", "I am very well, thank you!", "I am fine, thank you for asking."]),
    (Wording("""
        [What|And what] is your name?
        Who are you?
        [Tell me|May I know|Can I know|Do you have|Can you tell me] your name[?|, please.|]
        [Tell me|Say something|Can you tell me something|Please talk] about [you|yourself].
        What are you?
        [Are you|You are] a [robot|human|person|computer|machine|real person]?
        [What can|What do] you do?
        What [are you able to do|are you good at|are your skills|kind of model are you]?
        How can you help me?
        [Introduce yourself|Please introduce yourself].
        What are you called?
        [I do not know you|We have not met]. Who are you?
        [Help|Help me|What can I ask you|What should I ask you]?
        """, """
        With whom do I have the pleasure?
        Give a short account of what you are.
        In what ways might you be of use?
        """), [ABOUT]),
    (Wording("""
        [Thanks|Thank you|Thanks a lot|Thank you very much|Many thanks|Thank you so much|Great, thanks|OK, thanks][!|.|]
        [That|This] [was|is] [great|very helpful|nice|perfect|good|right][!|.|, thank you!]
        [Well done|Good job|Very good|Perfect|Great|Nice|Wonderful|Good answer|That is right][!|.|]
        You are [great|very helpful|nice|clever|kind|so smart][!|.|]
        """, """
        Much obliged!
        How thoughtful of you.
        """), ["You are welcome!", "I am glad that I could help.", "You are welcome! Is there anything else?"]),
    (Wording("""
        [Bye|Goodbye|Bye bye|See you|See you later|See you soon|Good night|Farewell|Until tomorrow][!|.|]
        [I have to go|I must go|I am leaving|I need to go][ now|]. [Bye|Goodbye|See you|Good night][!|.]
        [Time to go|It is late|I am tired]. [Bye|Goodbye|Good night]!
        """, """
        Take care, I am off.
        So long!
        """), ["Goodbye! Have a nice day.", "Goodbye! See you soon.", "Bye! Take care."]),
    (Wording("""
        I am [sad|unhappy|so sad|a bit sad|lonely|not happy|feeling down|very sad][ today| now|].
        I feel [sad|bad|lonely|down|terrible|awful][ today| now|].
        [Today is a bad day|My day was bad|I had a bad day|Nothing works today|I want to cry].
        """, """
        Everything seems gloomy to me.
        My heart is heavy.
        """), ["I am sorry to hear that. I hope that you feel better soon.", "I am sorry. Do you want to hear a story?"]),
    (Wording("""
        I am [happy|so happy|very happy|glad|excited|in a good mood][ today| now|].
        I feel [great|good|happy|wonderful|fine][ today| now|].
        [Today is a good day|My day was great|I had a good day|I am fine|I am well, thank you].
        """, """
        I could jump for joy.
        Life treats me well these days.
        """), ["That is good to hear!", "That is great! I am happy for you."]),
    (Wording("""
        I am [tired|so tired|very tired|sleepy][ today| now|].
        [I did not sleep|I could not sleep|I need sleep|I slept badly].
        """, """
        My eyes keep falling shut.
        """), ["You should get some rest. Sleep well!", "Then it is time for a rest."]),
    (Wording("""
        I am [bored|so bored|very bored][ today| now|].
        [I have nothing to do|What shall I do|What can I do now|Life is boring].
        """, """
        Time just will not pass here.
        """), ["Shall I tell you a story?", "We could do some sums, or I could tell you a story."]),
    (Wording("""
        [Tell me|Do you know|Say|Give me] a joke[.|?|, please.]
        [Make me laugh|Be funny|Say something funny|I want to laugh].
        """, """
        Crack a joke for me.
        """), ["Why did the hen cross the road? To get to the other side!", "What has four legs and cannot walk? A table!"]),
]
MET = Wording("""
    [Hello|Hi|Hey|Good morning|Good evening|Hi there|Hello there][!|,|.] [I am|my name is|I'm|this is|I am called|they call me] <n>.
    [My name is|I am|I'm|I am called|They call me|You can call me|Call me] <n>[.|!]
    [My name is|I am|I'm] <n>[. What is yours?|, and you?|. Nice to meet you.|. How are you?|. Hello!]
    [This is|It is|It's] <n>[ here| speaking|].
    [May I introduce myself|Let me introduce myself]? [I am|My name is] <n>.
    <n> is my name.
    [Hello|Hi|Hey], <n> here.
    [Hello|Hi|Hey] [Corella|friend|you][!|,|.] [I am|my name is|I'm] <n>.
    [I am|I'm] <n>[, nice to meet you| from next door| and I am new here|, your new friend].
    [My friends|People|They all|My parents] call me <n>.
    [The person talking is|You are talking to|Here is|Here comes] <n>.
    [Everybody|Everyone] knows me as <n>.
    [Please|You may|Just] call me <n>.
    [Just so you know|By the way], [I am|my name is] <n>.
    """, """
    Greetings, the name is <n>.
    At home everybody says <n> to me.
    I go by <n>, good day.
    """)
LIKE = Wording("""
    I [like|love|really like|enjoy] <f>.
    My favourite food is <f>.
    I [want|am hungry for|would like] some <f>.
    [Do you like|Do you eat|What about] <f>?
    I [adore|prefer|always eat|often cook|could eat] <f>.
    [There is nothing better than|I am fond of|I am crazy about|My friend likes|My children like] <f>.
    [Today|For lunch|For dinner] [I eat|we have|there are|I will cook] <f>.
    [How do you like|Would you like|Do you enjoy] [some |]<f>?
    """, """
    I am mad about <f>.
    <f> always cheer me up.
    """)
OUT = Wording("""
    [Who|Which person] is the [president|prime minister|king|head] of <land>?
    [Who|Which team] won the [world cup|election|war|game|match] in <year>?
    [What|How] is the weather [today|tomorrow|right now|going to be]?
    What time is it[ now|]?
    [What day is it today|What is the date today|Which year is it]?
    [Write|Give me|Can you write] [some|a piece of|a] [Python|Java|Rust|C] [code|program|script] [for me|that sorts a list|that reads a file|].
    [How do I|How can I|Please help me to] [fix|repair|install|buy|sell|build|cook|program] [my |a ]<o>?
    [Translate|Can you translate] [this|"<w>"|this text] into [French|German|Spanish|Latin|Chinese].
    [What|Which] [medicine|pill|drug|treatment] [should I take|helps] [for|against] [a headache|a cold|fever|pain]?
    [Should I|Can I|How do I] [buy|sell|invest in|trade] [stocks|bitcoin|gold|shares]?
    [What is|Explain|What do you know about] [quantum physics|relativity|gravity|evolution|democracy|philosophy|inflation|the stock market|machine learning|the internet|photosynthesis|black holes|chemistry|electricity|genetics].
    [What is|Tell me] the [meaning of life|secret of happiness|news|latest news|traffic|population of <land>|price of gold].
    [Book|Order|Buy|Call|Send|Find] [me |][a flight|a taxi|a pizza|an email|a hotel|a doctor|a ticket][ to <land>| for tomorrow|].
    [Who wrote|Who painted|Who invented|Who discovered] [Hamlet|the Mona Lisa|the telephone|America|the light bulb|Don Quixote]?
    [Why is|Why does] [the sky blue|the earth turn|ice float|the moon shine|it rain|time pass]?
    [Write|Compose] [an essay|a poem|a letter|a song|an email|a speech] [about|on] [politics|love|war|my boss|the economy|climate change].
    [What|How much] is the [square root of <year>|logarithm of <year>|integral of x]?
    [How far|How high|How big|How old|How heavy] is [the moon|the sun|Mount Everest|the universe|the earth|<land>]?
    [Can you|Please] [see|look at|draw|play|open|show] [a picture|me|music|a video|my file|the door][ for me|].
    [What do you think about|Do you believe in|What is your opinion on] [god|politics|the war|love|ghosts|taxes|the government]?
    [When|Where] was [Napoleon|Einstein|Shakespeare|Mozart|Caesar|Newton] born?
    [Search|Look up|Google] [the internet|this|the news|my name][ for me|].
    [Is it legal|Is it safe|Is it allowed] to [drive fast|fly a drone|drink wine|fish here]?
    [Recommend|Suggest] [a film|a book|a restaurant|a phone|a laptop|a game][ for me|].
    [Who|Which man|Which woman|Which country|Which company] [rules|owns|built|runs|leads] [<land>|the world|the biggest bank|the internet]?
    [How many|What number of] [people|cities|cars|rivers] [are there|live] in <land>?
    [What|Which] [language|food|money|religion] [do they|do people] [speak|eat|use|have] in <land>?
    [Debug|Fix|Review|Test|Explain] [my|this] [code|program|function|web site|computer][.|, please.]
    [How does|How do] [a computer|an engine|the brain|the heart|a phone|planes|the law|money|a battery|a magnet] work?
    [Explain|Describe|Summarise|Tell me about] [the history of <land>|the second world war|the Roman Empire|the law|how to get rich|modern art|the universe|atoms|DNA].
    [What is|What are] [the best|the cheapest|the newest] [phone|car|computer|camera|film|hotel|bank][s|] [in <land>|of the year|this year|]?
    [Is|Was|Will] [<land>|the economy|the election|the climate|the future] [be |][good|bad|safe|rich]?
    [How can I|How do I|What should I do to] [lose weight|earn money|learn <w>|stop smoking|find a job|sleep better|become famous]?
    [Solve|What is the solution of] [the equation|this equation]: x + <year> = 0
    [My head|My back|My arm|My tooth] hurts. What [should I do|can I take]?
    [Predict|Guess|Tell me] [the future|the lottery numbers|who will win|the stock price].
    [Who is|Who was|What do you know about] [Elvis|Picasso|Beethoven|Plato|Gandhi|Cleopatra|Galileo|the pope]?
    [Write|Generate|Create] [a web site|an app|a SQL query|a regular expression|a business plan|a contract|a CV][ for me|].
    [What happened|What was important] in <year>?
    [Which|What] [party|team|film|song|horse] [will|is going to] win [next year|tomorrow|the prize]?
    [Name|Tell me|What is] the [formula|chemical name|temperature|speed|weight|size] of [water|light|iron|salt|the sun|sound].
    [Interpret|Explain] [this dream|my dream|this poem|this joke|this contract|my horoscope].
    [Compare|What is the difference between] [two cars|cats and dogs|<land> and France|science and art].
    """, """
    Which party will win the next vote in <land>?
    Debug my web server, it crashes at start.
    How do vaccines work?
    Name the chemical formula of sugar.
    What are the rules for taxes on houses?
    Which smartphone has the best camera?
    Interpret my dream about falling.
    How did the Roman Empire fall?
    Compare two religions for me.
    """)
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


SYSTEM_NAME = Wording("""
    You are <n>[, a <j>|, a <t> <j>|, a <t> helper|, a helpful assistant|].
    Your name is <n>[. You are a <j>|. You are <t>|].
    [You are|Act as|Play] a <j> [called|named] <n>.
    [You are called|People call you|They call you] <n>[ and you work as a <j>|].
    [From now on|In this talk|In this game|Here|Today], [you are|your name is|you are called] <n>[. You are a <j>|, a <j>|].
    <n> is your name[. You are a <j>|. You work as a <j>|. Be <t>|].
    [You play|You act as|Be|Pretend to be] <n>, [a|the] [<t> |]<j>.
    [The assistant|This assistant|This bot|The model] is [called|named] <n>[. It is <t>|. It is a <j>|].
    [The user calls you|Everybody calls you|You have the name] <n>.
    I am talking to <n>, a <t> <j>.
    """, """
    Take on the role of <n>[, a <j>|].
    In this chat you go by <n>.
    """)
WHO = TALK[2][0]
WHO_NAME = Wording("""
    [What|And what] is your name?
    Who are you?
    [Tell me|May I know|Can you tell me|Do you have] your name[?|, please.|]
    What are you called?
    [Hello|Hi|Hey|Good morning][!|,|.] [who are you|what is your name]?
    [Please introduce|Introduce] yourself.
    [How shall I call you|What should I call you|What can I call you]?
    [And you|And who are you|Who is there|Who am I talking to|With whom am I talking|Who is this]?
    [I am Tom|I am new|Nice to meet you]. [And you|Who are you|What is your name]?
    [How are you called|What do they call you|What do people call you|Which name do you have|Do you have a name]?
    [Say|Please say|I want to know|I would like to know|Let me know] your name.
    """, """
    With whom do I have the pleasure?
    How would you like to be addressed?
    """)
SYSTEM_START = Wording("""
    [Start|Begin] [every|each|your] [answer|reply] with "<w>".
    [Always|You always] [start|begin] with "<w>".
    [Say|Write] "<w>" [before|at the start of] [every|each] [answer|reply].
    [Put|Place|Use] "<w>" [at the start of|before|in front of] [every|each|your] [answer|reply].
    [Every|Each] [answer|reply] [starts|begins|must start|should begin] with "<w>".
    [First|In each reply, first|In every answer, first] say "<w>"[, then answer|].
    [The first word|The beginning] of [every|each] [answer|reply] is "<w>".
    """, """
    Open all replies with "<w>".
    """)
SYSTEM_END = Wording("""
    [End|Finish|Close] [every|each|your] [answer|reply] with "<w>".
    [Always|You always] [end|finish] with "<w>".
    [Say|Write] "<w>" [after|at the end of] [every|each] [answer|reply].
    [Put|Place|Use] "<w>" [at the end of|after|behind] [every|each|your] [answer|reply].
    [Every|Each] [answer|reply] [ends|finishes|must end|should finish] with "<w>".
    [Last|In each reply, last|At last] say "<w>".
    [The last word|The end] of [every|each] [answer|reply] is "<w>".
    """, """
    Close all replies with "<w>".
    """)
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


# ---------------------------------------------------------------- the whole

SKILLS = {"story": story, "reading": reading, "json": json_skill, "sums": sums, "talk": talk, "lists": lists, "facts": facts}


def dialogue(rng):
    """One training dialogue of the final mix; some carry several tasks after one another."""
    mix = LAST_MIX if STAGE > 3 else MIX
    names, weights = list(mix), list(mix.values())
    ctx = Context(rng)
    d = SKILLS[rng.choices(names, weights)[0]](ctx)
    if rng.random() < 0.12:
        second = SKILLS[rng.choices(names, weights)[0]](Context(rng))
        if d.messages[0][0] != "system" and second.messages[0][0] != "system":
            d = Dialogue("several", d.messages + second.messages)
    if d.messages[0][0] != "system" and rng.random() < 0.06:
        d.messages.insert(0, ("system", rng.choice(SYSTEM_PLAIN)))
    return d.messages


def plain_text(rng):
    ctx = Context(rng)
    return story_text(ctx, story_parts(ctx, rng.randint(1, 3)))


def long_dialogue(rng, enough):
    """Tasks one after another until `enough(messages)`: what a long conversation looks like."""
    messages = []
    while not enough(messages):
        more = dialogue(rng)
        messages += more if not messages else [m for m in more if m[0] != "system"]
    return messages


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
