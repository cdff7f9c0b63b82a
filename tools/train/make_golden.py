"""make_golden.py MODEL_DIR OUT_DIR: records what the exported model answers to five prompts, in the layout `weft verify`
reads. Double precision from the stored weights; beside it how far float32 strays, and how far bf16 operands do (choices
forced), from which weft's bounds follow. OUT_DIR gets links to the model's files."""
import json
import os
import sys

import torch

import checkpoint
import data
import model as M
import ops
import tasks

FORCED = {}


def rounded(x):
    return x.to(torch.bfloat16).to(x.dtype)


class Operands:
    """torch.nn.functional and ops with the roundings of an engine whose products take bf16 operands and sum in more:
    the input of every matrix, the rows of the caches, queries, keys and values. The residual stream is not rounded: a
    bound from activations that are bf16 throughout (0.10 where this gives 0.03) would hide real mistakes."""

    def __init__(self, real):
        self.real = real

    def __getattr__(self, name):
        return getattr(self.real, name)

    def linear(self, x, weight):
        return self.real.linear(rounded(x), weight)

    def attend(self, q, k, v, selected=None):
        return self.real.attend(rounded(q), rounded(k), rounded(v), selected)

    def kda(self, proj, f, *rest):
        return self.real.kda(rounded(proj), rounded(f), *rest)


def record(model, ids, dtype):
    """Logits, chosen experts [T, layers, k] and selections per DSA layer of one prompt."""
    model.to(torch.float64 if dtype == torch.float64 else torch.float32)
    model.dtype = dtype
    trace = []
    hidden, _ = model(ids.unsqueeze(0), mode="sparse", trace=trace)
    gates = [l.block_sparse_moe.gate for l in model.model.layers if hasattr(l, "block_sparse_moe")]
    experts = torch.stack([g.chosen[0].topk(g.top).indices.sort(-1).values for g in gates], 1)
    return model.logits(hidden)[0].double(), experts.int(), [entry[5] for entry in trace]


def gate_forward(self, x):
    """The recorded experts instead of the present ones."""
    s = torch.sigmoid(torch.nn.functional.linear(x, self.weight.to(x.dtype)).to(torch.promote_types(x.dtype, torch.float32)))
    self.chosen = FORCED["experts"][self.number]
    s = s * self.chosen.to(s.dtype)
    return s / (s.sum(-1, keepdim=True) + 1e-20)


def selected_lists(chosen, tokens, top_k):
    rows = torch.full((tokens, top_k), -1, dtype=torch.int32)
    for t in range(tokens):
        row = torch.arange(t + 1) if chosen is None else chosen[0, t].nonzero().flatten()
        rows[t, :len(row)] = row.int()
    return rows


def prompts():
    prose = open(data.WORK + "/prose.txt").read()
    out = [data.encode(prose[at:at + 400])[:12] for at in (1200, 40000, 80000)]
    chat = tasks.Ids()
    dialog = tasks.Chat(chat, False)
    dialog.user("The secret code of amber falcon is 482913. What is the secret code of amber falcon?")
    dialog.prompt()
    long = data.encode(prose[20000:21000])[:136]  # longer than the 128 rows a query reads
    return [torch.tensor(x) for x in out + [chat.ids, long]]


@torch.no_grad()
def main(source, target):
    config = M.Config(source + "/config.json")
    model = M.Model(config)
    checkpoint.load(model, checkpoint.read(source + "/model.safetensors"))
    plain = M.Gate.forward
    tensors, cases, worst32, worst16, mean16 = {}, [], 0.0, 0.0, []
    gates = [l.block_sparse_moe.gate for l in model.model.layers if hasattr(l, "block_sparse_moe")]
    for number, gate in enumerate(gates):
        gate.number = number
    for n, ids in enumerate(prompts()):
        name, T = f"p{n}", len(ids)
        logits, experts, chosen = record(model, ids, torch.float64)
        single, same, _ = record(model, ids, torch.float32)
        assert torch.equal(experts, same), f"prompt {n} has a near call between experts: choose another"
        worst32 = max(worst32, float((single - logits).abs().max()))
        FORCED["experts"] = [g.chosen for g in gates]
        M.Gate.forward = gate_forward
        selections = iter(chosen)
        select, M.Indexer.select = M.Indexer.select, lambda *_: next(selections)
        M.F, M.ops = Operands(M.F), Operands(M.ops)
        drift = (record(model, ids, torch.float64)[0] - logits).abs()
        M.F, M.ops = M.F.real, M.ops.real
        M.Gate.forward, M.Indexer.select = plain, select
        worst16 = max(worst16, float(drift.max()))
        mean16.append(float(drift.mean()))
        tensors |= {f"{name}.ids": ids.int(), f"{name}.logits": logits.float(), f"{name}.experts": experts}
        selected = {}
        for layer, c in zip(config.full, chosen):
            tensors[f"{name}.selected.{layer}"] = selected_lists(c, T, config.top_k)
            selected[str(layer)] = f"{name}.selected.{layer}"
        cases.append({"name": name, "tokens": T, "ids": f"{name}.ids", "logits": f"{name}.logits",
                      "experts": f"{name}.experts", "selected": selected})
    golden = {"model": "weft-small", "family": "kimi_k31", "made_by": "tools/train/make_golden.py", "cases": cases,
              "tolerance": {"logits_fp32_vs_fp64": worst32},
              "bf16_activations": {"selections_and_experts_forced": {"max_abs_logit_change": worst16,
                                                                     "mean_abs_logit_change": max(mean16)}}}
    os.makedirs(target, exist_ok=True)
    checkpoint.write(target + "/golden.safetensors", tensors)
    with open(target + "/golden.json", "w") as f:
        f.write(json.dumps(golden, indent=1) + "\n")
    for name in ("config.json", "model.safetensors"):
        link = f"{target}/{name}"
        if not os.path.lexists(link):
            os.symlink(os.path.relpath(f"{source}/{name}", target), link)
    print(golden["tolerance"], golden["bf16_activations"])


if __name__ == "__main__":
    main(*sys.argv[1:3])
