"""Generated tasks whose answers can be checked: facts with keys, told again shuffled or asked in chat form.

A sample is a list of pieces (text, kind, weight): kind `ids` holds token ids, `text` is encoded; weight 0: no loss
(cannot be known), 1: ordinary text, 2: an answer. Answers restate the fact: the key then stands right before the
value again, which a model learns far sooner than to answer with the bare value."""
import os
import random

import data

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT, NOTHING, ANSWER = 1, 0, 2
CUT = None  # among the pieces of a message: see Ids.cut


def words():
    lines = open(HERE + "/words.txt").read().split("\n")
    return [line.split(": ")[1].split() for line in lines[:2]]


ADJECTIVES, NOUNS = words()
MORE_ADJECTIVES = """active big busy cheap clean common complete correct current deep direct double dry empty exact
false fast final firm flat fresh full general global good hard heavy high hot important inner internal large last left
light local long low main major minor modern native new next normal open outer past plain present primary private
public quick random raw real recent regular remote rich right round safe secure sharp short simple single slow small
smooth soft solid special stable standard static strict strong sweet tall thick thin tiny total true unique upper
useful usual valid warm weak wet wide wise wooden young""".split()
MORE_NOUNS = """account address area army artist author bank base battery boat book bottle box branch bread bucket
building button cable camera card carpet chain chair channel circle city client clock cloud coat coffee college column
computer corner country course cousin daughter desk device doctor door driver editor engine farm father field file
filter finger fish floor flower frame friend game gate glass group guard guide hall hand hat head heart hill horse
hotel house image judge key king kitchen lake lamp leader letter library line lock machine manager map member memory
message method milk model moon mother mouse museum name network night node object office officer order owner page
paint paper parent park party path pattern pencil people phone picture pilot pipe plane planet plant plate player
pocket poem point police pool port priest printer process program queen question radio reader record report ring road
robot roof room root rose sailor scale school screen sea seat secret sector server service shadow sheet ship shirt
shoe shop signal singer sister snow soldier song source spoon stage star station stone storm story street student
table tail teacher team ticket tower town train tree truck tutor uncle user village voice wall water weather wheel
winter witch wolf writer yard""".split()
NAMES = """Alice Bruno Carla David Elena Felix Grace Henry Irene James Karen Lucas Maria Nadia Oscar Paula Quinn Robert
Sarah Thomas Ursula Victor Wendy Xavier Yvonne Zoe Anna Boris Clara Dennis Emma Frank Gina Hugo Ivan Julia Kevin Laura
Martin Nina Oliver Peter Rosa Simon Tina Vera Walter""".split()
CITIES = """Paris Berlin Madrid Rome Vienna Lisbon Oslo Athens Dublin Prague Warsaw Cairo Lagos Nairobi Tokyo Seoul Delhi
Lima Quito Boston Chicago Denver Dallas Seattle Toronto Sydney Perth Geneva Zurich Milan Naples Porto""".split()
ATTRIBUTES = """secret code|access number|serial number|door code|phone number|account number|order number|ticket number|
license number|room number|security code|tracking number|reference number|password|build number|port number""".replace(
    "\n", "").split("|")
WORD_ATTRIBUTES = "color|owner|location|material|symbol|mascot|favorite city|password|nickname|label|category".split("|")


def two_words(rng):
    kind = rng.random()
    if kind < 0.5:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    return f"{rng.choice(ADJECTIVES + MORE_ADJECTIVES)} {rng.choice(NOUNS + MORE_NOUNS)}"


def key(rng):
    kind = rng.random()
    if kind < 0.75:
        return two_words(rng)
    if kind < 0.85:
        return rng.choice(NAMES)
    if kind < 0.93:
        return f"{rng.choice(NOUNS + MORE_NOUNS)} {rng.randint(1, 99)}"
    return rng.choice(NOUNS + MORE_NOUNS)


def number(rng):
    size = rng.choice((6, 6, 6, 5, 4))
    return "".join(rng.choice("0123456789") for _ in range(size))


def phrase(rng):
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(CITIES)
    if kind < 0.6:
        return rng.choice(NOUNS + MORE_NOUNS)
    return two_words(rng)


# (fact, question); {k} key, {v} value, {a} attribute
TEMPLATES = [
    ("The {a} of {k} is {v}.", "What is the {a} of {k}?"),
    ("The {a} of the {k} is {v}.", "What is the {a} of the {k}?"),
    ("The {a} for {k} is {v}.", "What is the {a} for {k}?"),
    ("For {k}, the {a} is {v}.", "Which {a} belongs to {k}?"),
    ("{k} has the {a} {v}.", "Which {a} does {k} have?"),
    ("Remember that the {a} of {k} is {v}.", "What is the {a} of {k}?"),
    ("{k}: {v}", "{k}?"),
    ("{k} = {v}", "What is {k}?"),
]


class Facts:
    """Facts of one template with different keys."""

    def __init__(self, rng, count, needle):
        self.rng = rng
        numeric = needle or rng.random() < 0.65
        self.attribute = "secret code" if needle else rng.choice(ATTRIBUTES if numeric else WORD_ATTRIBUTES)
        self.fact, self.question = TEMPLATES[0] if needle else rng.choice(TEMPLATES)
        keys = set()
        while len(keys) < count:
            keys.add(f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" if needle and rng.random() < 0.8 else key(rng))
        self.pairs = [(k, number(rng) if numeric else phrase(rng)) for k in sorted(keys)]
        if needle:
            self.pairs = [(k, "".join(rng.choice("0123456789") for _ in range(6))) for k, _ in self.pairs]
        rng.shuffle(self.pairs)

    def say(self, i):
        k, v = self.pairs[i]
        return self.fact.format(a=self.attribute, k=k, v=v)

    def tell(self, i):
        """[(text, weight)] of a fact told for the first time: nothing of it can be known."""
        return [(self.say(i), NOTHING)]

    def repeat(self, i, weight):
        """A fact told again: which one comes cannot be known, its value can."""
        k, v = self.pairs[i]
        before, after = self.fact.split("{v}")
        before = before.format(a=self.attribute, k=k)
        # The value's tokens follow a space that belongs to the first of them.
        return [(before[:-1], NOTHING), (before[-1] + v + after, weight)]

    def ask(self, i):
        return self.question.format(a=self.attribute, k=self.pairs[i][0])


# Chat -------------------------------------------------------------------------------------------------------------

EFFORT = ("`thinking_effort` guides on how much to think in your thinking channel (not including the response channel),"
          " supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with "
          "`thinking_effort={}`.")


class Ids:
    """Collects token ids and loss weights."""

    def __init__(self):
        self.ids, self.kinds, self.cuts = [], [], []

    def text(self, text, kind=TEXT):
        new = data.encode(text)
        self.ids += new
        self.kinds += [kind] * len(new)

    def special(self, name, kind=TEXT):
        self.ids.append(data.special(name))
        self.kinds.append(kind)

    def pieces(self, pieces):
        for text, kind in pieces:
            self.text(text, kind)

    def cut(self):
        """A place where KDA may be made to forget: what was told before it is asked for behind it."""
        self.cuts.append(len(self.ids))

    def open(self, name, attributes=(), kind=TEXT):
        self.special("<|open|>", kind)
        self.text(name, kind)
        for k, v in attributes:
            for piece in (" " + k, '="', v, '"'):
                self.text(piece, kind)
        self.special("<|sep|>", kind)

    def close(self, name, kind=TEXT):
        self.special("<|close|>", kind)
        self.text(name, kind)
        self.special("<|sep|>", kind)

    def end_message(self, kind=TEXT):
        self.close("message", kind)
        self.special("<|end_of_msg|>", kind)


class Chat:
    """The K3 chat format with thinking on (an empty think block) or off."""

    def __init__(self, out, thinking, effort="max"):
        self.out, self.thinking = out, thinking
        if thinking:
            out.open("message", [("role", "system"), ("type", "thinking-effort")])
            out.text(EFFORT.format(effort))
            out.end_message()

    def user(self, *pieces):
        """Texts or (text, kind) pairs; what a user writes is not predicted unless a pair says so."""
        self.out.open("message", [("role", "user")])
        for p in pieces:
            self.out.cut() if p is CUT else self.out.pieces([(p, NOTHING) if isinstance(p, str) else p])
        self.out.end_message()

    def prompt(self):
        self.out.open("message", [("role", "assistant")])
        self.out.open("think" if self.thinking else "response")

    def answer(self, text):
        self.prompt()
        if self.thinking:
            self.out.close("think")
            self.out.open("response")
        self.out.text(text, ANSWER)
        self.out.close("response", ANSWER)
        self.out.end_message()


# Samples ----------------------------------------------------------------------------------------------------------

def shuffled_repeats(rng, facts, rounds, weight=ANSWER):
    """Facts, then the same facts again in another order, `rounds` times."""
    out = Ids()
    joint = rng.choice(("\n", " ", " ", "\n\n"))
    n = len(facts.pairs)
    for i in range(n):
        out.pieces(facts.tell(i))
        out.text(joint)
    for _ in range(rounds):
        out.cut()
        order = rng.sample(range(n), n)
        for i in order:
            out.pieces(facts.repeat(i, weight))
            out.text(joint, NOTHING)
    out.special("[EOS]")
    return out


def question_sample(rng, facts, filler, questions, thinking=None):
    """A document with the facts between the sentences of `filler` (a list of sentences), then questions."""
    out = Ids()
    thinking = rng.random() < 0.7 if thinking is None else thinking
    chat = Chat(out, thinking, rng.choice(("max", "max", "max", "low", "high", "medium")))
    document = place(rng, [facts.say(i) for i in range(len(facts.pairs))], filler)
    asked = [rng.randrange(len(facts.pairs)) for _ in range(questions)]
    if rng.random() < 0.15:
        chat.user(*document)
        chat.answer("I have read it.")
        chat.user(CUT, facts.ask(asked[0]))
    else:
        chat.user(*document, CUT, "\n\n" + facts.ask(asked[0]))
    chat.answer(facts.say(asked[0]))
    for i in asked[1:]:
        chat.user(CUT, facts.ask(i))
        chat.answer(facts.say(i))
    out.special("[EOS]")
    return out


def place(rng, facts, filler):
    """Pieces: every fact as a sentence of its own between the sentences of `filler` (texts that end in white space)."""
    power = 3 if rng.random() < 0.3 else 1  # three in ten documents have most of their facts at the front
    spots = sorted(int(rng.random()**power * (len(filler) + 1)) for _ in facts)
    out, at = [], 0
    for spot, fact in zip(spots, facts):
        out += [(x, TEXT) for x in filler[at:spot]] + [(fact + " ", NOTHING)]
        at = spot
    out += [(x, TEXT) for x in filler[at:]]
    out[-1] = (out[-1][0].rstrip(), out[-1][1])
    return joined(out)


def joined(pieces):
    """Neighbours of one kind together, white space at the front of a piece: tokens then fall as in the whole text."""
    out, carry = [], ""
    for text, kind in pieces:
        text = carry + text
        body = text.rstrip()
        carry = text[len(body):]
        if out and out[-1][1] == kind:
            out[-1] = (out[-1][0] + body, kind)
        else:
            out.append((body, kind))
    return out


def copy_sample(rng):
    """A list that is told twice, or random words repeated: plain copying."""
    out = Ids()
    items = [rng.choice((number, phrase, key))(rng) for _ in range(rng.randint(3, 20))]
    text = rng.choice((", ", " ", "\n", "; ")).join(items)
    if rng.random() < 0.5:
        chat = Chat(out, rng.random() < 0.7)
        chat.user(rng.choice(("Repeat this: ", "Copy: ", "Say again: ")) + text)
        chat.answer(text)
    else:
        out.text(text + "\n", NOTHING)
        out.text(text + "\n", ANSWER)
    out.special("[EOS]")
    return out


def table_sample(rng):
    """Rows of a table with two or three columns, some of them asked."""
    out = Ids()
    heads = rng.sample(["name", "code", "city", "price", "owner", "status"], 3)
    rows = [(k, number(rng), rng.choice(CITIES)) for k in dict.fromkeys(two_words(rng) for _ in range(rng.randint(2, 10)))]
    lines = [" | ".join(heads)] + [" | ".join(r) for r in rows]
    chat = Chat(out, rng.random() < 0.7)
    text = "\n".join(lines)
    for turn in range(rng.randint(1, 3)):
        row, column = rng.choice(rows), rng.choice((1, 2))
        question = f"What is the {heads[column]} of {row[0]}?"
        chat.user(*[text, CUT, "\n\n" + question] if turn == 0 else [CUT, question])
        chat.answer(f"The {heads[column]} of {row[0]} is {row[column]}.")
    out.special("[EOS]")
    return out


def plain_sample(rng):
    """Text of tasks for the vocabulary."""
    facts = Facts(rng, 4, rng.random() < 0.4)
    return " ".join(facts.say(i) for i in range(4)) + "\n" + facts.ask(0) + "\n" + phrase(rng) + "\n"
