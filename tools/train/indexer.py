"""The indexers: their start, and their training beside the trunk.

Loss: KL(attention averaged over heads || softmax of the index score), on sampled rows of long sequences. Nothing flows
from it into the trunk."""
import torch

from tasks import ANSWER

ROWS = 256


def rows_of(kinds):
    """Rows to train on: every answer token's query (they decide retrieval) and random others."""
    answers = (kinds == ANSWER).nonzero().flatten()
    answers = answers[torch.randperm(len(answers))[:ROWS // 2]]
    others = torch.randint(len(kinds) // 8, len(kinds), (ROWS - len(answers),))
    return torch.cat([answers, others])


def layer_loss(indexer, entry, rows, top_k):
    x, qr, _, q, k, _ = entry
    S = k.shape[2]
    seen = torch.arange(S) <= rows.unsqueeze(-1)
    with torch.no_grad():
        score = (q[0, :, rows] @ k[0].transpose(1, 2)).float() * q.shape[-1]**-0.5
        target = torch.softmax(score.masked_fill(~seen, -80.0), -1).mean(0)
    score = indexer.score(x[:, rows], qr[:, rows], indexer.key(x))[0].masked_fill(~seen, -80.0)
    predicted = torch.log_softmax(score, -1)
    loss = (target * ((target + 1e-9).log() - predicted)).sum(-1).mean()
    best = torch.topk(score.detach(), min(top_k, S), -1).indices
    return loss, float(target.gather(-1, best).sum(-1).mean()), best


HEADS = (0, 2, 3)  # of the four that an indexer starts from: 0 and 1 look for the same (source_loss)


@torch.no_grad()
def align(model, trace):
    """Starts every indexer as a copy of its attention: the key holds the content keys of three heads and the part that
    all heads share (3 x 32 + 32 = 128), query heads are those of the three heads in turn, and the weights bring the
    scores of each to the same size: a selection must hold what any of them reads. From a random start the indexers run
    after a trunk that moves and hardly learn (4.5 nats after 60 steps; aligned 1 nat at once)."""
    c = model.c
    for i, (x, qr, _, q, k, _) in zip(c.full, trace):
        a, x, qr = model.model.layers[i].self_attn, x[0].float(), qr[0].float()
        indexer = a.indexer
        latent, pe = a.kv_a_proj_with_mqa.weight.split([c.kv_rank, c.rope])
        size = (x @ latent.t()).pow(2).mean().sqrt()
        content = a.kv_b_proj.weight.view(c.heads, -1, c.kv_rank)[HEADS, :c.nope].flatten(0, 1)
        indexer.wk.weight.copy_(torch.cat([content * a.kv_a_layernorm.weight / size @ latent, pe]))
        query, want = a.q_b_proj.weight.view(c.heads, -1, c.q_rank), indexer.wq_b.weight.view(indexer.heads, -1, c.q_rank)
        one = torch.linalg.solve(x.t() @ x + 0.01 * len(x) * torch.eye(x.shape[1]), x.sum(0))  # x @ one is about 1
        rows = torch.arange(len(x) // 2, len(x), 16)
        seen = torch.arange(len(x)) <= rows.unsqueeze(-1)
        key = indexer.key(x)
        want.zero_()
        for j in range(indexer.heads):
            slot = j % len(HEADS)
            h = HEADS[slot]
            want[j, slot * c.nope:(slot + 1) * c.nope] = query[h, :c.nope]
            want[j, -c.rope:] = query[h, c.nope:]
            score = qr[rows] @ want[j].t() @ key.t()
            logit = (q[0, h, rows] @ k[0, h].t()).float() * q.shape[-1]**-0.5
            want[j] *= min(4.0, float(logit[seen].std())) / score[seen].std() * (indexer.heads * indexer.dim)**0.5
            indexer.weights_proj.weight[j] = one * len(HEADS) / indexer.heads


def teach(model, trace, kinds, share=0.2):
    """During the training of the trunk: the indexers' loss on the first sequence of a batch, and a pull on the
    attention itself: what lies outside its own best three quarters of top-k columns is lost to any selection, what lies
    outside the indexer's is lost to this one.
    Returns the loss and per layer KL/mass inside the indexer's selection/mass inside the best selection."""
    total, shown = 0.0, []
    rows = rows_of(kinds[0])
    for i, (x, qr, _, q, k, _) in zip(model.c.full, trace):
        indexer = model.model.layers[i].self_attn.indexer
        kl, mass, chosen = layer_loss(indexer, (x[:1], qr[:1], None, q[:1].detach(), k[:1].detach(), None), rows, model.c.top_k)
        score = (q[0, :, rows] @ k[0].transpose(1, 2)).float() * q.shape[-1]**-0.5
        attention = torch.softmax(score.masked_fill(torch.arange(k.shape[2]) > rows.unsqueeze(-1), -80.0), -1).mean(0)
        best = torch.topk(attention.detach(), model.c.top_k * 3 // 4, -1).indices
        inside = attention.gather(-1, best).sum(-1).mean()
        total = total + kl + share * (2 - inside - attention.gather(-1, chosen).sum(-1).mean())
        shown.append(f"{float(kl.detach()):.2f}/{mass:.2f}/{float(inside.detach()):.2f}")
    return total, shown
