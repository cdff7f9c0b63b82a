"""Training batches: text and tasks mixed by stage. One sampler per run; its random state is part of a checkpoint."""
import random
import re

import numpy as np
import torch

import data
import tasks

# length, sequences, share of plain text, share of shuffled repeats among the tasks, most facts of a sample, and the
# score (exact answers among 8 facts at this length) that opens the next stage
STAGES = [
    dict(length=128, batch=16, text=0.10, repeats=0.85, facts=4, gate=0.50),
    dict(length=256, batch=8, text=0.15, repeats=0.60, facts=12, gate=0.90),
    dict(length=512, batch=4, text=0.20, repeats=0.40, facts=24, gate=0.85),
    dict(length=1024, batch=2, text=0.25, repeats=0.25, facts=32, gate=0.85),
    dict(length=2048, batch=2, text=0.25, repeats=0.20, facts=32, gate=0.85),
    dict(length=4096, batch=1, text=0.25, repeats=0.10, facts=32, gate=0.85),
    dict(length=8192, batch=1, text=0.25, repeats=0.05, facts=32, gate=0.85),
    dict(length=16384, batch=1, text=0.25, repeats=0.05, facts=32, gate=0.95),
    dict(length=32768, batch=1, text=0.20, repeats=0.00, facts=32, gate=1.0),
]
# How often a step has which stage's length when all are mixed: most tokens then stand in rows of 2K to 8K.
MIX = [0, 6, 20, 36, 27, 8, 2, 1, 0]

# Share of the tasks in which the KDA states are emptied between what was told and the question: a short row then
# teaches what long rows ask for, that the MLA layers look things up. Left alone the states do all retrieval, over as
# far as they reach.
FORGET = 0.6


class Sampler:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.tokens = np.fromfile(data.WORK + "/train.u16", np.uint16)
        self.texts = [d["text"] for d in data.documents() if d["package"] not in ("dict-jargon",)]

    def filler(self, characters):
        """Sentences of a training document, about so many characters."""
        out, size = [], 0
        while size < characters:
            text = self.rng.choice(self.texts)
            start = self.rng.randrange(max(1, len(text) - (characters - size)))
            piece = re.split(r"(?<=[.!?:])(?=\s)", text[start:start + characters - size])[1:]
            for sentence in piece:
                out.append(sentence.lstrip() + (" " if sentence[:1] == " " else "\n"))
                size += len(out[-1])
            size += 1
        return out

    def task(self, stage, room):
        rng = self.rng
        most = max(1, min(stage["facts"], room // 28))
        count = max(1, min(most, int(2**rng.uniform(0, np.log2(most + 1)))))
        kind = rng.random()
        if kind < stage["repeats"]:
            facts = tasks.Facts(rng, count, rng.random() < 0.4)
            return tasks.shuffled_repeats(rng, facts, max(1, min(3, room // (count * 20) - 1)))
        if kind > 0.94:
            return tasks.table_sample(rng)
        if kind > 0.88:
            return tasks.copy_sample(rng)
        count = max(1, min(count, (room - 120) // 18))
        facts = tasks.Facts(rng, count, rng.random() < 0.5)
        questions = rng.randint(1, max(1, min(16, count + 1, (room - 120 - 18 * count) // 60)))
        spare = room - 110 - 16 * count - 55 * questions
        wish = rng.random()
        characters = 0 if wish < 0.2 or spare < 40 else int(3 * spare * (1 if wish > 0.5 else rng.random()))
        filler = self.filler(characters) if characters > 60 else []
        return tasks.question_sample(rng, facts, filler, questions)

    def row(self, stage):
        length = stage["length"] + 1
        if self.rng.random() < stage["text"]:
            at = self.rng.randrange(len(self.tokens) - length)
            return self.tokens[at:at + length].astype(np.int64), np.ones(length, np.int64), np.zeros(length, bool)
        ids, kinds, cut = [], [], np.zeros(length, bool)
        while len(ids) < length:
            room = length - len(ids)
            if ids and room < 100:  # not enough for a whole sample: text fills the row
                at = self.rng.randrange(len(self.tokens) - room)
                ids += self.tokens[at:at + room].tolist()
                kinds += [tasks.TEXT] * room
                break
            sample = self.task(stage, room)
            if self.rng.random() < FORGET:
                cut[[len(ids) + at for at in sample.cuts if at < room]] = True
            ids += sample.ids
            kinds += sample.kinds
        return np.array(ids[:length]), np.array(kinds[:length]), cut

    def batch(self, stage):
        """ids [B, L + 1], kind of every target [B, L], inputs before which KDA forgets [B, L]."""
        rows = [self.row(stage) for _ in range(stage["batch"])]
        ids, kinds, cut = (torch.tensor(np.stack(x)) for x in zip(*rows))
        return ids, kinds[:, 1:], cut[:, :-1].contiguous()


def loss_weights(kinds):
    """Mean over answers and mean over other text, mixed by the share of answers; 0 where nothing can be known."""
    answers, text = (kinds == tasks.ANSWER).float(), (kinds == tasks.TEXT).float()
    n, m = answers.sum(), text.sum()
    share = min(0.6, 0.002 * float(n)) if m > 0 else 1.0
    return answers * (share / n.clamp(min=1)) + text * ((1 - share) / m.clamp(min=1))
