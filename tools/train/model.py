"""Kimi-K3.1 in PyTorch, as small as it gets. Parameter names are the released tensor names (without
`language_model.`), except that the experts of a layer are stacked: experts.w13 [2, E, I, L], experts.w2 [E, L, I].

Shapes: B sequences, T tokens, D hidden. Layer numbers count from 0. A forward pass may continue an earlier one
(`cache`: a list of what every layer keeps), which is a constant then: no gradient flows into it."""
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import ops


class Config:
    def __init__(self, path):
        self.raw = json.load(open(path))
        text = self.raw["text_config"]
        self.vocab, self.dim = text["vocab_size"], text["hidden_size"]
        self.layers, self.block = text["num_hidden_layers"], text["attn_res_block_size"]
        self.heads, self.nope = text["num_attention_heads"], text["qk_nope_head_dim"]
        self.rope, self.v_dim = text["qk_rope_head_dim"], text["v_head_dim"]
        self.q_rank, self.kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
        self.dense_width, self.expert_width = text["intermediate_size"], text["moe_intermediate_size"]
        self.experts, self.top_experts = text["num_experts"], text["num_experts_per_token"]
        self.shared_width = text["num_shared_experts"] * self.expert_width
        self.latent = text["routed_expert_hidden_size"]
        linear, dsa = text["linear_attn_config"], text["dsa_config"]
        self.kda_heads, self.kda_dim = linear["num_heads"], linear["head_dim"]
        self.full = [i - 1 for i in linear["full_attn_layers"]]
        self.index_heads, self.index_dim = dsa["index_n_heads"], dsa["index_head_dim"]
        self.top_k = dsa["index_topk"]


def matrix(rows, columns, scale=1.0):
    return nn.Parameter(torch.randn(rows, columns) * scale / math.sqrt(columns))


class Weight(nn.Module):
    """A released tensor `name.weight`; applied as a matrix when called."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(value) if not isinstance(value, nn.Parameter) else value

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def norm(dim):
    return Weight(torch.ones(dim))


class KdaAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = c.kda_heads * c.kda_dim
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            setattr(self, name, Weight(matrix(width, c.dim)))
        self.b_proj = Weight(matrix(c.kda_heads, c.dim))
        self.f_a_proj, self.f_b_proj = Weight(matrix(c.kda_dim, c.dim)), Weight(matrix(width, c.kda_dim))
        self.o_proj = Weight(matrix(c.dim, width))
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            setattr(self, name, Weight(torch.randn(width, 1, 4) * 0.5))
        self.A_log = nn.Parameter(torch.zeros(c.kda_heads))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.o_norm = norm(c.kda_dim)

    def forward(self, x, cache, cut=None, **_):
        fused = torch.cat([m.weight for m in (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.b_proj)])
        proj, f = F.linear(x, fused.to(x.dtype)), self.f_b_proj(self.f_a_proj(x))
        conv = torch.stack([m.weight.squeeze(1).t() for m in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        history, state = cache if cache else (None, None)
        if cache:  # without one no copy, and no zeros for its gradient
            proj = torch.cat([history, proj], 1)
        y, state = ops.kda(proj, f, conv, self.A_log, self.dt_bias, self.o_norm.weight, state, cut)
        return self.o_proj(y), (proj[:, -3:].detach(), state.detach())


class Indexer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.dim = c.index_heads, c.index_dim
        self.wq_b, self.wk = Weight(matrix(self.heads * self.dim, c.q_rank)), Weight(matrix(self.dim, c.dim))
        self.weights_proj = Weight(matrix(self.heads, c.dim))
        self.k_norm = norm(self.dim)
        self.k_norm.bias = nn.Parameter(torch.zeros(self.dim))

    def key(self, x):
        return F.layer_norm(self.wk(x), (self.dim,), self.k_norm.weight.to(x.dtype), self.k_norm.bias.to(x.dtype), 1e-5)

    def score(self, x, qr, key):
        """[B, T, S] scores of all columns, the future included."""
        q = self.wq_b(qr).unflatten(-1, (self.heads, self.dim))
        a = F.linear(x, self.weights_proj.weight.to(x.dtype)).to(torch.promote_types(x.dtype, torch.float32))
        total = 0
        for j in range(self.heads):
            total = total + a[..., j:j + 1] * torch.relu(q[:, :, j] @ key.transpose(1, 2)).to(a.dtype)
        return total * (self.heads * self.dim)**-0.5

    def select(self, x, qr, key, top_k):
        """[B, T, S] booleans: the top_k best visible columns of every row, lower columns first among equals."""
        T, S = x.shape[1], key.shape[1]
        if S <= top_k:
            return None
        if ops.FAST:
            q = self.wq_b(qr).unflatten(-1, (self.heads, self.dim))
            return torch.stack([ops.select(q[b], F.linear(x[b], self.weights_proj.weight.to(x.dtype)), key[b], top_k)
                                for b in range(len(x))])
        seen = ops.visible(S - T, T, S)
        score = self.score(x, qr, key).masked_fill(~seen, -torch.inf)
        best = torch.sort(score, stable=True, dim=-1, descending=True).indices[..., :top_k]
        return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True) & seen


class MlaAttention(nn.Module):
    def __init__(self, c, indexer=True):
        super().__init__()
        self.c = c
        self.q_a_proj, self.q_a_layernorm = Weight(matrix(c.q_rank, c.dim)), norm(c.q_rank)
        self.q_b_proj = Weight(matrix(c.heads * (c.nope + c.rope), c.q_rank))
        self.kv_a_proj_with_mqa = Weight(matrix(c.kv_rank + c.rope, c.dim))
        self.kv_a_layernorm = norm(c.kv_rank)
        self.kv_b_proj = Weight(matrix(c.heads * (c.nope + c.v_dim), c.kv_rank))
        self.g_proj, self.o_proj = Weight(matrix(c.heads * c.v_dim, c.dim)), Weight(matrix(c.dim, c.heads * c.v_dim))
        self.indexer = Indexer(c) if indexer else None

    def forward(self, x, cache, mode="dense", trace=None, **_):
        c = self.c
        qr = ops.rms_norm(self.q_a_proj(x), self.q_a_layernorm.weight, 1e-6)
        latent, pe = self.kv_a_proj_with_mqa(x).split([c.kv_rank, c.rope], -1)
        latent = ops.rms_norm(latent, self.kv_a_layernorm.weight, 1e-6)
        key = self.indexer.key(x.detach()) if mode != "dense" else x[..., :0]
        if cache:
            latent, pe, key = (torch.cat([old, new], 1) for old, new in zip(cache, (latent, pe, key)))
        kept = (latent.detach(), pe.detach(), key.detach())
        q = self.q_b_proj(qr).unflatten(-1, (c.heads, -1)).transpose(1, 2)
        nope, v = self.kv_b_proj(latent).unflatten(-1, (c.heads, -1)).transpose(1, 2).split([c.nope, c.v_dim], -1)
        k = torch.cat([nope, pe.unsqueeze(1).expand(-1, c.heads, -1, -1)], -1)
        selected = None
        if mode == "sparse":
            with torch.no_grad():
                selected = self.indexer.select(x, qr, key, c.top_k)
        if mode == "recent" and key.shape[1] > c.top_k:
            T, S = x.shape[1], key.shape[1]
            selected = (ops.visible(S - T, T, S) & ~ops.visible(S - T - c.top_k, T, S)).expand(x.shape[0], -1, -1)
        if trace is not None:
            trace.append((x.detach(), qr.detach(), key, q, k, selected))
        o = ops.attend(q, k, v, selected).transpose(1, 2).flatten(-2)
        return self.o_proj(o * torch.sigmoid(self.g_proj(x))), kept


class Mlp(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        self.gate_proj, self.up_proj = Weight(matrix(width, dim)), Weight(matrix(width, dim))
        self.down_proj = Weight(matrix(dim, width))

    def forward(self, x):
        return self.down_proj(ops.situ(F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight]).to(x.dtype))))


class Gate(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.top = c.top_experts
        self.weight = matrix(c.experts, c.dim, 0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(c.experts))
        self.probability = self.chosen = None  # of the last call, for the balance of the load

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        s = torch.sigmoid(F.linear(x, self.weight.to(x.dtype)).to(wide))
        best = torch.topk(s.detach() + self.e_score_correction_bias.to(wide), self.top, -1).indices
        self.chosen = torch.zeros_like(s).scatter_(-1, best, 1.0)
        self.probability = s
        s = s * self.chosen
        return s / (s.sum(-1, keepdim=True) + 1e-20)


class Experts(nn.Module):
    """All experts as one wide network whose hidden columns carry the routing weight (0: not chosen): for eight small
    experts two products are faster than sixteen gathered ones."""

    def __init__(self, c):
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(2, c.experts, c.expert_width, c.latent) / math.sqrt(c.latent))
        self.w2 = nn.Parameter(torch.randn(c.experts, c.latent, c.expert_width) / math.sqrt(c.expert_width))

    def forward(self, z, route):
        gu = F.linear(z, self.w13.flatten(0, 2).to(z.dtype))
        return F.linear(ops.situ(gu, route), self.w2.permute(1, 0, 2).flatten(1).to(z.dtype))


class Moe(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate, self.experts = Gate(c), Experts(c)
        self.routed_expert_down_proj = Weight(matrix(c.latent, c.dim))
        self.routed_expert_norm = norm(c.latent)
        self.routed_expert_up_proj = Weight(matrix(c.dim, c.latent))
        self.shared_experts = Mlp(c.dim, c.shared_width)

    def forward(self, x):
        r = self.experts(self.routed_expert_down_proj(x), self.gate(x))
        r = ops.rms_norm(r, self.routed_expert_norm.weight)
        return self.routed_expert_up_proj(r) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.restart = index % c.block == 0
        self.self_attn = MlaAttention(c) if index in c.full else KdaAttention(c)
        if index == 0:
            self.mlp = Mlp(c.dim, c.dense_width)
        else:
            self.block_sparse_moe = Moe(c)
        self.input_layernorm, self.post_attention_layernorm = norm(c.dim), norm(c.dim)
        for site in ("self_attention", "mlp"):
            setattr(self, site + "_res_norm", norm(c.dim))
            setattr(self, site + "_res_proj", Weight(torch.zeros(1, c.dim)))

    def read(self, site, sources, gamma):
        key = getattr(self, site + "_res_norm").weight * getattr(self, site + "_res_proj").weight[0]
        return ops.mix(sources, key, gamma.weight)

    def forward(self, bank, p, cache, **how):
        x = self.read("self_attention", bank + [p], self.input_layernorm)
        if self.restart:
            bank = bank + [p]
        a, kept = self.self_attn(x, cache, **how)
        p = a if self.restart else p + a
        y = self.read("mlp", bank + [p], self.post_attention_layernorm)
        return bank, p + (self.mlp if hasattr(self, "mlp") else self.block_sparse_moe)(y), kept


class Trunk(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = Weight(torch.randn(c.vocab, c.dim))
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        self.norm, self.output_attn_res_norm = norm(c.dim), norm(c.dim)
        self.output_attn_res_proj = Weight(torch.zeros(1, c.dim))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, self.model = c, Trunk(c)
        self.lm_head = Weight(matrix(c.vocab, c.dim))
        self.dtype = torch.bfloat16

    def forward(self, ids, cache=None, taps=None, **how):
        """ids [B, T] -> the normed last hidden state [B, T, D] and the caches. mode: dense, sparse or recent;
        trace: a list that receives what the indexers' training needs; cut [B, T]: tokens before which KDA forgets; taps: a list that receives the running sum
        after every layer and the last mix, normed without the weights of model.norm."""
        m = self.model
        p = F.embedding(ids, m.embed_tokens.weight).to(self.dtype)
        bank, kept = [], []
        for i, layer in enumerate(m.layers):
            bank, p, k = layer(bank, p, cache[i] if cache else None, **how)
            kept.append(k)
            if taps is not None:
                taps.append(p)
        key = m.output_attn_res_norm.weight * m.output_attn_res_proj.weight[0]
        if taps is not None:
            taps.append(ops.mix(bank + [p], key, torch.ones_like(key)))
        return ops.mix(bank + [p], key, m.norm.weight), kept

    def logits(self, hidden):
        return self.lm_head(hidden)
