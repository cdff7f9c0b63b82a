"""Trains and scores the drafts of a frozen model.

    draft.py train MODEL.pt DRAFTS.pt [--steps N] [--start DRAFTS.pt]
    draft.py score MODEL.pt DRAFTS.pt

The target of a slot is the model's own most likely token given what stands before it. Half of the rows are training
text, half what the model itself writes behind such text: a step of speculation continues as the model would, and along
a text the model would not have written later slots have targets nobody could know (trained on text alone, slots 2 to 5
held 0.22 0.08 0.07 0.03; see models/weft-small)."""
import argparse
import json

import torch
import torch.nn.functional as F

import data
import ops
from batches import STAGES, Sampler
from drafts import DSpark, Mtp, blocks
from optimiser import Optimiser
from train import HERE, build

CONFIG = json.load(open(HERE + "/dspark.json"))
ANCHORS = 160
PROMPT, OWN = 128, 64


def load_model(path):
    model = build()
    model.load_state_dict(torch.load(path, weights_only=False)["model"])
    return model.requires_grad_(False)


@torch.no_grad()
def target(model, ids):
    """ids [B, T] -> the model's next tokens [B, T], its last mix [B, T, D], the taps [B, T, 3 D], embeddings [B, T, D]."""
    taps = []
    hidden, _ = model(ids, taps=taps)
    chosen = torch.cat([model.logits(h).argmax(-1) for h in hidden.flatten(0, 1).split(1024)]).view_as(ids)
    context = torch.cat([taps[i] for i in CONFIG["target_layer_ids"]], -1)
    return chosen, taps[-1], context, F.embedding(ids, model.model.embed_tokens.weight).to(model.dtype)


def mtp_rows(module, mix, embedded):
    """y of rows 0..T-2: row p pairs the mix at p with token p + 1."""
    after = embedded[:, 1:].clone()
    after[:, 0] = 0
    return module(after, mix[:, :-1].contiguous())[0]


def mtp_loss(module, chosen, mix, embedded):
    logits = module.logits(mtp_rows(module, mix, embedded)).flatten(0, 1)
    weight = torch.full((len(logits),), 1 / len(logits))
    # row p predicts what follows token p + 1
    total, _, hit = ops.cross_entropy(logits, chosen[:, 1:].flatten(), weight)
    return total, hit.mean()


def dspark_rows(model, module, context, anchors, anchor_tokens, length):
    """Hidden states [A, size, D] of blocks whose anchor token stands at `anchors` of the rows of `length` tokens laid
    end to end in context [B T, 3 D]."""
    size, embed = CONFIG["block_size"], model.model.embed_tokens.weight
    position, mask = blocks(anchors, size, len(context), length)
    x = embed[CONFIG["mask_token_id"]].to(context.dtype).expand(len(anchors), size, -1).clone()
    x[:, 0] = embed[anchor_tokens].to(context.dtype)
    return module(x.flatten(0, 1), position, module.context(context), mask).unflatten(0, (len(anchors), size))


def dspark_loss(model, module, ids, chosen, context, first):
    """Blocks at random places from `first` on of every row."""
    size, (rows, length) = CONFIG["block_size"], ids.shape
    anchors = torch.randint(first, length - size, (ANCHORS,)) + torch.randint(rows, (ANCHORS,)) * length
    ids, chosen, context = ids.flatten(), chosen.flatten(), context.flatten(0, 1)
    h = dspark_rows(model, module, context, anchors, ids[anchors], length)
    at = anchors.unsqueeze(1) + torch.arange(size)
    previous, wanted = ids[at].flatten(), chosen[at].flatten()
    logits = model.logits(h.flatten(0, 1)) + module.bias(previous).to(h.dtype)
    weight = torch.exp(-torch.arange(size) / 2).expand(ANCHORS, -1)  # a slot counts only behind right ones
    total, _, hit = ops.cross_entropy(logits, wanted, (weight / weight.sum()).flatten())
    sure = F.binary_cross_entropy_with_logits(module.confidence(h.flatten(0, 1).detach(), previous), hit)
    return total + 0.2 * sure, hit.view(-1, size).mean(0)


def start(model):
    """As useful as they can be before the first step: the MTP module reads the mean of its two inputs with the
    target's own head."""
    mtp, dspark = Mtp(model.c), DSpark(CONFIG)
    with torch.no_grad():
        half = torch.eye(model.c.dim) * 0.5
        mtp.eh_proj.weight.copy_(torch.cat([half, half], 1))
        mtp.shared_head.norm.weight.copy_(model.model.norm.weight)
        mtp.shared_head.head.weight.copy_(model.lm_head.weight)
        dspark.final_norm.weight.copy_(model.model.norm.weight)
    return mtp, dspark


@torch.no_grad()
def generate(model, prompts, count):
    """Greedy continuations of prompts [B, T], token by token on the caches; [B, T + count]."""
    parts, cache = [prompts], None
    for _ in range(count):
        hidden, cache = model(parts[-1], cache)
        parts.append(model.logits(hidden[:, -1]).argmax(-1, keepdim=True))
    return torch.cat(parts, 1)


class OwnText:
    """Rows the model wrote: 128 tokens of training text and 64 of its own, every row used twice."""

    def __init__(self, model, sampler):
        self.model, self.sampler, self.waiting = model, sampler, []

    def batch(self):
        if not self.waiting:
            rows = generate(self.model, self.sampler.batch(STAGES[0] | {"batch": 190, "text": 0.85})[0][:, :PROMPT], OWN)
            self.waiting = list(rows.split(5)) + list(rows[torch.randperm(len(rows))].split(5))
        return self.waiting.pop()


def train(args):
    """Both drafts at once: they share the target's forward pass."""
    torch.manual_seed(4)
    model = load_model(args.model)
    mtp, dspark = start(model)
    if args.start:
        state = torch.load(args.start)
        mtp.load_state_dict(state["mtp"])
        dspark.load_state_dict(state["dspark"])
    both, sampler, shown = torch.nn.ModuleDict({"mtp": mtp, "dspark": dspark}), Sampler(args.seed), torch.zeros(2, 6)
    optimiser, own = Optimiser(both), OwnText(model, sampler)
    for step in range(args.steps):
        text = sampler.batch(STAGES[3] | {"batch": 1, "text": 0.85})[0][:, :-1]
        for kind, (ids, first) in enumerate(((text, 8), (own.batch(), PROMPT))):
            chosen, mix, context, embedded = target(model, ids)
            one, hit1 = mtp_loss(mtp, chosen, mix, embedded)
            block, hits = dspark_loss(model, dspark, ids, chosen, context, first)
            ((one + block) / 2).backward()
            shown[kind] = 0.98 * shown[kind] + 0.02 * torch.cat([hit1.view(1), hits])
        rate = min(1, (step + 1) / 10) * min(1, (args.steps - step) / (0.6 * args.steps))
        optimiser.step(rate, muon=0.015, adam=2e-3)
        if step % 20 == 0 or step == args.steps - 1:
            hits = (shown / (1 - 0.98**(step + 1))).tolist()
            print(step, "text, own:", *([round(x, 3) for x in row] for row in hits), flush=True)
        if step % 200 == 199 or step == args.steps - 1:
            torch.save({"mtp": mtp.state_dict(), "dspark": dspark.state_dict()}, args.out)


@torch.no_grad()
def agreement(model, mtp, dspark, ids, first, last):
    """Of steps anchored at first..last-1 of every row of ids [B, T]: whether MTP's token is the model's next one, and
    which of DSpark's are with all drafts before them right. The model's tokens are known along the rows only, so a
    draft behind a place where a row is not what the model would write counts as wrong."""
    chosen, mix, context, embedded = target(model, ids)
    hit = mtp.logits(mtp_rows(mtp, mix, embedded)).argmax(-1) == chosen[:, 1:]
    size, (rows, length) = CONFIG["block_size"], ids.shape
    anchors = (torch.arange(rows).unsqueeze(1) * length + torch.arange(first, last)).flatten()
    ids, chosen, context = ids.flatten(), chosen.flatten(), context.flatten(0, 1)
    alive = []
    for part in anchors.split(256):
        # The anchor is the true text's token, later drafts go by the draft's own choices.
        h = dspark_rows(model, dspark, context, part, ids[part], length)
        good, previous, slots = torch.ones(len(part), dtype=torch.bool), ids[part], []
        for k in range(size):
            previous = (model.logits(h[:, k]) + dspark.bias(previous).to(h.dtype)).argmax(-1)
            good = good & (previous == chosen[part + k])
            slots.append(good)
            good = good & (chosen[part + k] == ids[part + k + 1]) if k + 1 < size else good
        alive.append(torch.stack(slots, 1))
    return hit[:, first - 1:last - 1].flatten().float(), torch.cat(alive).float()


def score(args):
    """On held-out text: teacher-forced at every place; one step of speculation (the model's own token behind 128 of
    text, then the drafts) at 512 places; and along the model's own text of 128 tokens, which ends in circles."""
    model = load_model(args.model)
    mtp, dspark = Mtp(model.c), DSpark(CONFIG)
    state = torch.load(args.out)
    mtp.load_state_dict(state["mtp"])
    dspark.load_state_dict(state["dspark"])
    prose, size = torch.tensor(data.encode(open(data.WORK + "/prose.txt").read())), CONFIG["block_size"]
    prompts = prose[:512 * 64 + PROMPT].unfold(0, PROMPT, 64)[:512]
    steps = generate(model, prompts, size + 1)
    own, long = generate(model, prompts[::4], 24 + size), generate(model, prompts[::16], 128)
    cases = {"held-out text, teacher-forced": (prose[:8192].view(8, -1).split(1), 8, 1024 - size),
             "held-out text, one step at 512 places": (steps.split(32), PROMPT, PROMPT + 1),
             "greedy text, first 24 tokens": (own.split(16), PROMPT, PROMPT + 24),
             "greedy text, 128 tokens": (long.split(8), PROMPT, PROMPT + 128 - size)}
    for name, (texts, first, last) in cases.items():
        pairs = [agreement(model, mtp, dspark, ids, first, last) for ids in texts]
        one = float(torch.cat([p[0] for p in pairs]).mean())
        slots = torch.cat([p[1] for p in pairs]).mean(0).tolist()
        print(f"{name}: MTP-1 {1 + one:.2f} tokens a step; DSpark {1 + sum(slots):.2f}, slots " +
              " ".join(f"{s:.2f}" for s in slots), flush=True)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=["train", "score"])
    p.add_argument("model")
    p.add_argument("out")
    p.add_argument("--start", default="", help="drafts of an earlier model, to continue with")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--seed", type=int, default=55)
    args = p.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    ops.FAST = True
    (train if args.what == "train" else score)(args)
