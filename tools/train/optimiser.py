"""Muon on matrices (Nesterov momentum 0.95, five Newton-Schulz steps, weight decay 0.1), Adam on the rest. Matrices of one shape are
orthogonalised in one batch; experts count as matrices of their own."""
import torch

import ops

AMX = "amx_bf16" in open("/proc/cpuinfo").read()


def orthogonal(g):
    """[n, rows, columns] -> nearest semi-orthogonal matrices, roughly."""
    tall = g.shape[1] > g.shape[2]
    x = g.transpose(1, 2) if tall else g
    if AMX and ops.FAST and all(n % 32 == 0 for n in g.shape[1:]):
        x = x.clone(memory_format=torch.contiguous_format)
        ops.run("muon_orthogonal", *x.shape, x)
        return x.transpose(1, 2) if tall else x
    x = x.to(torch.bfloat16)
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        a = torch.bmm(x, x.transpose(1, 2))
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return (x.transpose(1, 2) if tall else x).float()


class Optimiser:
    def __init__(self, model, frozen=()):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.names = [n for n, _ in named]
        self.parameters = [p for _, p in named]
        self.muon, self.adam = {}, []
        for i, (name, p) in enumerate(named):
            if self.is_matrix(name, p):
                self.muon.setdefault(tuple(p.shape[-2:]), []).append(i)
            else:
                self.adam.append(i)
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = {i: torch.zeros_like(self.parameters[i]) for i in self.adam}
        self.steps = 0

    @staticmethod
    def is_matrix(name, p):
        small = ("b_proj.weight", "gate.weight", "res_proj.weight", "embed_tokens", "lm_head", "conv1d", "norm",
                 "weights_proj")
        return p.dim() >= 2 and not any(s in name and not (s == "b_proj.weight" and "f_b_proj" in name or
                                                           s == "b_proj.weight" and "_b_proj" in name) for s in small)

    @torch.no_grad()
    def step(self, rate, muon=0.02, adam=3e-3):
        self.steps += 1
        for shape, members in self.muon.items():
            grads = []
            for i in members:
                g, m = self.parameters[i].grad, self.first[i]
                m.mul_(0.95).add_(g, alpha=0.05)
                grads.append((g * 0.05 + m * 0.95).reshape(-1, *shape))
            u = orthogonal(torch.cat(grads)).split([len(g) for g in grads])
            scale = rate * muon * max(1.0, shape[0] / shape[1])**0.5
            for i, x in zip(members, u):
                self.parameters[i].mul_(1 - 0.1 * rate * muon).sub_(x.reshape(self.parameters[i].shape), alpha=scale)
        for i in self.adam:
            p, m, v = self.parameters[i], self.first[i], self.second[i]
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
            slow = 0.1 if "gate.weight" in self.names[i] else 1.0  # a fast router collapses
            size = slow * rate * adam / (1 - 0.9**self.steps)
            p.addcdiv_(m, (v / (1 - 0.95**self.steps)).sqrt_().add_(1e-8), value=-size)
        for p in self.parameters:
            p.grad = None

    def state(self):
        return {"names": self.names, "first": self.first, "second": self.second, "steps": self.steps}

    def load(self, state):
        assert state["names"] == self.names
        for a, b in zip(self.first, state["first"]):
            a.copy_(b)
        for i, x in state["second"].items():
            self.second[i].copy_(x)
        self.steps = state["steps"]
