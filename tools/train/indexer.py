"""The indexers: copies of their attention, into whose selection the attention is then pulled.

They are not trained by themselves: a copy holds 85 to 99 % of the attention at once, and an attention that is told to
stay inside what its copy selects holds 97 % at 4,096 tokens at the end of a training that never moves the copy."""
import torch

from tasks import ANSWER

ROWS = 256


def rows_of(kinds):
    """Rows to look at: answer tokens' queries (they decide retrieval) and random others."""
    answers = (kinds == ANSWER).nonzero().flatten()
    answers = answers[torch.randperm(len(answers))[:ROWS // 2]]
    others = torch.randint(len(kinds) // 8, len(kinds), (ROWS - len(answers),))
    return torch.cat([answers, others])


HEADS = (0, 2, 3)  # of the four that an indexer starts from: 0 and 1 look for the same (source_loss)


@torch.no_grad()
def align(model, trace):
    """Starts every indexer as a copy of its attention: the key holds the content keys of three heads and the part that
    all heads share (3 x 32 + 32 = 128), query heads are those of the three heads in turn, and the weights bring the
    scores of each to the same size: a selection must hold what any of them reads."""
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


def pull(model, trace, kinds, share=0.2):
    """What the attention of some rows of the first sequence (mean of the heads) leaves outside its own best three
    quarters of top-k columns, which is lost to any selection, and outside the indexer's, which is lost to this one.
    Returns the loss and per layer the mass inside the indexer's selection/inside the best one."""
    total, shown = 0.0, []
    rows, top = rows_of(kinds[0]), model.c.top_k
    for i, (x, qr, _, q, k, _) in zip(model.c.full, trace):
        unseen = torch.arange(k.shape[2]) > rows.unsqueeze(-1)
        indexer = model.model.layers[i].self_attn.indexer
        with torch.no_grad():
            score = indexer.score(x[:1, rows], qr[:1, rows], indexer.key(x[:1]))[0].masked_fill(unseen, -torch.inf)
            chosen = torch.topk(score, top, -1).indices
        score = (q[0, :, rows] @ k[0].transpose(1, 2)).float() * q.shape[-1]**-0.5
        attention = torch.softmax(score.masked_fill(unseen, -80.0), -1).mean(0)
        best = torch.topk(attention.detach(), top * 3 // 4, -1).indices
        selected, inside = (attention.gather(-1, columns).sum(-1).mean() for columns in (chosen, best))
        total = total + share * (2 - inside - selected)
        shown.append(f"{float(selected.detach()):.2f}/{float(inside.detach()):.2f}")
    return total, shown
