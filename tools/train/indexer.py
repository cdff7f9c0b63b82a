"""Trains the indexers of a finished trunk: indexer.py IN.pt OUT.pt [--steps N] [--stages 4,5,6]

Loss: KL(attention averaged over heads || softmax of the index score), on sampled rows of long sequences; the trunk is
frozen and reads densely. Prints KL and the share of attention inside the top-k for every layer."""
import argparse

import torch

import data
import ops
from batches import STAGES, Sampler
from tasks import ANSWER
from train import build

ROWS = 384


def rows_of(kinds, generator):
    """Rows to train on: every answer token's query (they decide retrieval) and random others."""
    answers = (kinds == ANSWER).nonzero().flatten()
    answers = answers[torch.randperm(len(answers), generator=generator)[:ROWS // 2]]
    others = torch.randint(len(kinds) // 8, len(kinds), (ROWS - len(answers),), generator=generator)
    return torch.cat([answers, others])


def layer_loss(indexer, entry, rows, top_k):
    x, qr, _, q, k, _ = entry
    S = k.shape[2]
    seen = torch.arange(S) <= rows.unsqueeze(-1)
    with torch.no_grad():
        score = (q[0, :, rows] @ k[0].transpose(1, 2)).float() * q.shape[-1]**-0.5
        target = torch.softmax(score.masked_fill(~seen, -torch.inf), -1).mean(0)
    score = indexer.score(x[:, rows], qr[:, rows], indexer.key(x))[0].masked_fill(~seen, -1e30)
    predicted = torch.log_softmax(score, -1)
    loss = (target * ((target + 1e-9).log() - predicted)).sum(-1).mean()
    best = torch.topk(score.detach(), min(top_k, S), -1).indices
    return loss, float(target.gather(-1, best).sum(-1).mean())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("source")
    p.add_argument("target")
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--stages", default="4,5,5,6")
    args = p.parse_args()
    torch.set_num_threads(1)
    ops.FAST = True
    state = torch.load(args.source, weights_only=False)
    model = build()
    model.load_state_dict(state["model"])
    for name, x in model.named_parameters():
        x.requires_grad_("indexer" in name)
    layers = [model.model.layers[i].self_attn for i in model.c.full]
    parameters = [x for l in layers for x in l.indexer.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    sampler, generator = Sampler(99), torch.Generator().manual_seed(3)
    stages = [STAGES[int(s)] | {"batch": 1} for s in args.stages.split(",")]
    for step in range(args.steps):
        rate = min(1, (step + 1) / 20) * min(1, (args.steps - step) / (0.6 * args.steps))
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * rate
        ids, kinds = sampler.batch(stages[step % len(stages)])
        trace = []
        with torch.no_grad():
            model(ids[:, :-1], trace=trace)
        rows = rows_of(kinds[0], generator)
        shown = []
        for layer, entry in zip(layers, trace):
            loss, mass = layer_loss(layer.indexer, entry, rows, model.c.top_k)
            loss.backward()
            shown.append(f"{float(loss.detach()):.3f}/{mass:.3f}")
        optimiser.step()
        optimiser.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:
            print(step, ids.shape[1] - 1, "KL/mass", *shown, flush=True)
    state["model"] = model.state_dict()
    torch.save({"model": state["model"], "tokens": state.get("tokens"), "seconds": state.get("seconds")}, args.target)


if __name__ == "__main__":
    main()
