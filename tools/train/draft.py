"""Trains and scores the drafts of a frozen model.

    draft.py train mtp|dspark MODEL.pt OUT.pt [--steps N]
    draft.py score MODEL.pt MTP.pt DSPARK.pt

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
ANCHORS = 48


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


def mtp_rows(module, ids, mix, embedded):
    """y of rows 0..T-2: row p pairs the mix at p with token p + 1."""
    after = embedded[1:].clone()
    after[0] = 0
    return module(after.unsqueeze(0), mix[:-1].unsqueeze(0))[0][0]


def mtp_loss(model, module, ids):
    chosen, mix, _, embedded = target(model, ids)
    logits = module.logits(mtp_rows(module, ids, mix, embedded))
    weight = torch.full((len(logits),), 1 / len(logits))
    total, _, hit = ops.cross_entropy(logits, chosen[1:], weight)  # row p predicts what follows token p + 1
    return total, hit.mean()


def dspark_rows(model, module, ids, context, anchors, anchor_tokens):
    """Hidden states [A, size, D] of blocks whose anchor token stands at position `anchors`."""
    size, embed = CONFIG["block_size"], model.model.embed_tokens.weight
    position, mask = blocks(anchors, size, len(context))
    x = embed[CONFIG["mask_token_id"]].to(context.dtype).expand(len(anchors), size, -1).clone()
    x[:, 0] = embed[anchor_tokens].to(context.dtype)
    return module(x.flatten(0, 1), position, module.context(context), mask).unflatten(0, (len(anchors), size))


def dspark_loss(model, module, ids):
    chosen, _, context, _ = target(model, ids)
    size = CONFIG["block_size"]
    anchors = torch.randint(8, len(ids) - size, (ANCHORS,))
    h = dspark_rows(model, module, ids, context, anchors, ids[anchors])
    at = anchors.unsqueeze(1) + torch.arange(size)
    previous, wanted = ids[at].flatten(), chosen[at].flatten()
    logits = model.logits(h.flatten(0, 1)) + module.bias(previous).to(h.dtype)
    weight = torch.exp(-torch.arange(size) / 4).expand(ANCHORS, -1)
    total, _, hit = ops.cross_entropy(logits, wanted, (weight / weight.sum()).flatten())
    sure = F.binary_cross_entropy_with_logits(module.confidence(h.flatten(0, 1).detach(), previous), hit)
    return total + 0.2 * sure, hit.view(-1, size).mean(0)


def train(args):
    torch.manual_seed(4)
    model = load_model(args.model)
    if args.kind == "mtp":
        module = Mtp(model.c)
        with torch.no_grad():  # as useful as the mean of both halves from the first step, and the target's own head
            half = torch.eye(model.c.dim) * 0.5
            module.eh_proj.weight.copy_(torch.cat([half, half], 1))
            module.shared_head.norm.weight.copy_(model.model.norm.weight)
            module.shared_head.head.weight.copy_(model.lm_head.weight)
    else:
        module = DSpark(CONFIG)
        with torch.no_grad():
            module.final_norm.weight.copy_(model.model.norm.weight)
    optimiser, sampler = Optimiser(module), Sampler(55)
    shown = 0
    for step in range(args.steps):
        total = 0
        for _ in range(2):
            stage = STAGES[[3, 3, 4][step % 3]] | {"batch": 1, "text": 0.6}
            ids = sampler.batch(stage)[0][0, :-1]
            loss, hit = (mtp_loss if args.kind == "mtp" else dspark_loss)(model, module, ids)
            (loss / 2).backward()
            shown = 0.97 * shown + 0.03 * hit
        rate = min(1, (step + 1) / 10) * min(1, (args.steps - step) / (0.5 * args.steps))
        optimiser.step(rate, muon=0.01, adam=2e-3)
        if step % 20 == 0 or step == args.steps - 1:
            print(step, round(float(loss.detach()), 3), (shown / (1 - 0.97**(2 * step + 2))).tolist(), flush=True)
    torch.save({"model": module.state_dict()}, args.out)


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
    hit = mtp.logits(mtp_rows(mtp, ids, mix, embedded)).argmax(-1) == chosen[1:]
    size = CONFIG["block_size"]
    anchors = torch.arange(first, len(ids) - size)
    alive = []
    for part in anchors.split(256):
        # The anchor is the true text's token, later drafts go by the draft's own choices.
        h = dspark_rows(model, dspark, ids, context, part, ids[part])
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
    mtp.load_state_dict(torch.load(args.out)["model"])
    dspark.load_state_dict(torch.load(args.third)["model"])
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
    p.add_argument("kind")
    p.add_argument("model")
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=200)
    args = p.parse_args()
    if args.what == "score":
        args.model, args.out, args.third = args.kind, args.model, args.out
    torch.set_num_threads(1)
    ops.FAST = True
    (train if args.what == "train" else score)(args)
