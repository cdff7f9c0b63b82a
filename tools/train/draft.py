"""Trains and scores the drafts of a frozen model.

    draft.py train MODEL.pt DRAFTS.pt [--steps N] [--start DRAFTS.pt]
    draft.py score MODEL.pt DRAFTS.pt

The target of a slot is the model's own most likely token given the true text before it. Score: tokens a step, the
model's own token included, on held-out text (teacher-forced) and on the model's own greedy text, per position."""
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


def load_model(path):
    model = build()
    model.load_state_dict(torch.load(path, weights_only=False)["model"])
    return model.requires_grad_(False)


@torch.no_grad()
def target(model, ids):
    """ids [T] -> the model's next tokens [T], its last mix [T, D], the taps [T, 3 D], embeddings [T, D]."""
    taps = []
    hidden, _ = model(ids.unsqueeze(0), taps=taps)
    chosen = torch.cat([model.logits(h).argmax(-1) for h in hidden[0].split(1024)])
    context = torch.cat([taps[i][0] for i in CONFIG["target_layer_ids"]], -1)
    return chosen, taps[-1][0], context, F.embedding(ids, model.model.embed_tokens.weight).to(model.dtype)


def mtp_rows(module, mix, embedded):
    """y of rows 0..T-2: row p pairs the mix at p with token p + 1."""
    after = embedded[1:].clone()
    after[0] = 0
    return module(after.unsqueeze(0), mix[:-1].unsqueeze(0))[0][0]


def mtp_loss(module, chosen, mix, embedded):
    logits = module.logits(mtp_rows(module, mix, embedded))
    weight = torch.full((len(logits),), 1 / len(logits))
    total, _, hit = ops.cross_entropy(logits, chosen[1:], weight)  # row p predicts what follows token p + 1
    return total, hit.mean()


def dspark_rows(model, module, context, anchors, anchor_tokens):
    """Hidden states [A, size, D] of blocks whose anchor token stands at position `anchors`."""
    size, embed = CONFIG["block_size"], model.model.embed_tokens.weight
    position, mask = blocks(anchors, size, len(context))
    x = embed[CONFIG["mask_token_id"]].to(context.dtype).expand(len(anchors), size, -1).clone()
    x[:, 0] = embed[anchor_tokens].to(context.dtype)
    return module(x.flatten(0, 1), position, module.context(context), mask).unflatten(0, (len(anchors), size))


def dspark_loss(model, module, ids, chosen, context):
    size = CONFIG["block_size"]
    anchors = torch.randint(8, len(ids) - size, (ANCHORS,))
    h = dspark_rows(model, module, context, anchors, ids[anchors])
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


def train(args):
    """Both drafts at once: they share the target's forward pass."""
    torch.manual_seed(4)
    model = load_model(args.model)
    mtp, dspark = start(model)
    if args.start:
        state = torch.load(args.start)
        mtp.load_state_dict(state["mtp"])
        dspark.load_state_dict(state["dspark"])
    both, sampler, shown = torch.nn.ModuleDict({"mtp": mtp, "dspark": dspark}), Sampler(args.seed), torch.zeros(6)
    optimiser = Optimiser(both)
    for step in range(args.steps):
        for _ in range(2):
            ids = sampler.batch(STAGES[3] | {"batch": 1, "text": 0.85})[0][0, :-1]
            chosen, mix, context, embedded = target(model, ids)
            one, hit1 = mtp_loss(mtp, chosen, mix, embedded)
            block, hits = dspark_loss(model, dspark, ids, chosen, context)
            ((one + block) / 2).backward()
            shown = 0.98 * shown + 0.02 * torch.cat([hit1.view(1), hits])
        rate = min(1, (step + 1) / 10) * min(1, (args.steps - step) / (0.6 * args.steps))
        optimiser.step(rate, muon=0.015, adam=2e-3)
        if step % 20 == 0 or step == args.steps - 1:
            hits = (shown / (1 - 0.98**(2 * step + 2))).tolist()
            print(step, round(float(one.detach()), 3), round(float(block.detach()), 3), [round(x, 3) for x in hits], flush=True)
        if step % 200 == 199 or step == args.steps - 1:
            torch.save({"mtp": mtp.state_dict(), "dspark": dspark.state_dict()}, args.out)


@torch.no_grad()
def generate(model, prompt, count):
    """Greedy continuation, token by token on the caches."""
    ids, cache = list(prompt), None
    piece = torch.tensor(ids)
    for _ in range(count):
        hidden, cache = model(piece.unsqueeze(0), cache)
        ids.append(int(model.logits(hidden[0, -1]).argmax()))
        piece = torch.tensor(ids[-1:])
    return torch.tensor(ids)


@torch.no_grad()
def agreement(model, mtp, dspark, ids, first):
    """Per position, the share of drafts equal to the model's next token with all drafts before them right."""
    chosen, mix, context, embedded = target(model, ids)
    hit = mtp.logits(mtp_rows(mtp, mix, embedded)).argmax(-1) == chosen[1:]
    size = CONFIG["block_size"]
    anchors = torch.arange(first, len(ids) - size)
    alive = []
    for part in anchors.split(256):
        # The anchor is the true text's token, later drafts go by the draft's own choices.
        h = dspark_rows(model, dspark, context, part, ids[part])
        good, previous, rows = torch.ones(len(part), dtype=torch.bool), ids[part], []
        for k in range(size):
            draft = (model.logits(h[:, k]) + dspark.bias(previous).to(h.dtype)).argmax(-1)
            good = good & (draft == chosen[part + k])
            if k + 1 < size:  # beyond it the model's choice is known only along the text
                good_next = good & (chosen[part + k] == ids[part + k + 1])
            rows.append(good)
            good, previous = (good_next, draft) if k + 1 < size else (good, draft)
        alive.append(torch.stack(rows, 1))
    return hit[first:].float(), torch.cat(alive).float()


def score(args):
    model = load_model(args.model)
    mtp, dspark = Mtp(model.c), DSpark(CONFIG)
    state = torch.load(args.out)
    mtp.load_state_dict(state["mtp"])
    dspark.load_state_dict(state["dspark"])
    prose = data.encode(open(data.WORK + "/prose.txt").read())
    cases = {"held-out text": [torch.tensor(prose[i:i + 1024]) for i in range(0, 8192, 1024)],
             "greedy text": [generate(model, prose[i:i + 128], 128) for i in range(0, 24000, 4000)]}
    for name, texts in cases.items():
        first = 8 if name == "held-out text" else 128
        pairs = [agreement(model, mtp, dspark, ids, first) for ids in texts]
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
