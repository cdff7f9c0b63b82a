"""Scores of a model: needles among facts of one template, bits per byte. Teacher-forced: an answer counts if every
token of it is the largest logit, which is the same as greedy decoding writing it."""
import math
import random
import re

import torch

import data
import ops
import tasks

CHUNK = 2048


def sentences(path):
    text = open(path).read()
    return [s.lstrip() + (" " if s[:1] == " " else "\n") for s in re.split(r"(?<=[.!?:])(?=\s)", text) if s.strip()]


def run(model, ids, cache=None, **how):
    """Hidden states of a long sequence in pieces; [T, D]."""
    out = []
    for piece in ids.split(CHUNK):
        hidden, cache = model(piece.unsqueeze(0), cache, **how)
        out.append(hidden[0])
    return torch.cat(out), cache


def needle_sample(rng, filler, length, count, thinking=True):
    """`count` facts in about `length` tokens of filler; the ids, and where the asked value's tokens are."""
    facts = tasks.Facts(rng, 1, True)
    pairs = {}
    while len(pairs) < count:
        pairs[f"{rng.choice(tasks.ADJECTIVES)} {rng.choice(tasks.NOUNS)}"] = str(rng.randint(100000, 999999))
    facts.pairs = list(pairs.items())
    characters, at, hay = int((length - 100 - 18 * count) * 3.2), rng.randrange(len(filler)), []
    while characters > 0:
        hay.append(filler[at % len(filler)])
        characters -= len(hay[-1])
        at += 1
    asked = 0 if rng.random() < 0.5 else rng.randrange(count)  # half the time the first of the document
    out = tasks.Ids()
    chat = tasks.Chat(out, thinking)
    chat.user(*tasks.place(rng, [facts.say(i) for i in range(count)], hay), "\n\n" + facts.ask(asked))
    start = len(out.ids)
    chat.answer(facts.say(asked))
    ids = torch.tensor(out.ids)
    first = next(i for i in range(start, len(out.ids)) if out.kinds[i] == tasks.ANSWER)
    value = len(data.encode(f"The secret code of {facts.pairs[asked][0]} is")) + first
    return ids, first, value, len(data.encode(" " + facts.pairs[asked][1]))


@torch.no_grad()
def needle(model, filler, length, count, trials, seed=7, **how):
    """Share of trials with the value right, and with the whole answer (key, value, closing marks) right."""
    rng, values, wholes = random.Random(seed * 1000 + count), 0, 0
    for _ in range(trials):
        ids, first, value, size = needle_sample(rng, filler, length, count)
        hidden, _ = run(model, ids[:-1], **how)
        right = model.logits(hidden[first - 1:]).argmax(-1) == ids[first:]
        values += bool(right[value - first:value - first + size].all())
        wholes += bool(right.all())
    return values / trials, wholes / trials


@torch.no_grad()
def bits_per_byte(model, text, window=2048, **how):
    ids = torch.tensor(data.encode(text))
    nats = 0
    for start in range(0, len(ids) - 1, window):
        piece = ids[start:start + window + 1]
        hidden, _ = model(piece[:-1].unsqueeze(0), **how)
        nats += float(torch.nn.functional.cross_entropy(model.logits(hidden[0]).float(), piece[1:], reduction="sum"))
    return nats / math.log(2) / len(text.encode())


def main():
    import sys
    from train import build
    torch.set_num_threads(1)
    ops.FAST = True
    model = build()
    model.load_state_dict(torch.load(sys.argv[1], weights_only=False)["model"])
    lengths = [int(x) for x in sys.argv[2].split(",")] if len(sys.argv) > 2 else [512, 1024, 2048, 4096, 8192, 16384]
    trials = int(sys.argv[3]) if len(sys.argv) > 3 else 20
    filler = sentences(data.WORK + "/haystack.txt")
    prose = open(data.WORK + "/prose.txt").read()
    for mode in ("dense", "sparse"):
        print(f"{mode}: {bits_per_byte(model, prose, mode=mode):.3f} bits/byte in windows of 2048")
    for length in lengths:
        for count in (1, 8, 32):
            if count * 40 < length:
                cells = " ".join(f"{mode} {100 * needle(model, filler, length, count, trials, mode=mode)[0]:.0f} %"
                                 for mode in ("dense", "sparse", "recent"))
                print(f"{length} tokens, {count} facts, {trials} trials: {cells}", flush=True)


if __name__ == "__main__":
    main()
