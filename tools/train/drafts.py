"""The two drafts of a frozen model, in the public layouts: an MTP module (layer N of the checkpoint) and a DSpark draft
(block of drafts in one pass, MLA with rope, causal inside the block, Markov head)."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import ops
from model import Mlp, MlaAttention, Moe, Weight, matrix, norm


class Mtp(nn.Module):
    """One decoder layer of the full-attention kind with plain residual adds, no indexer and its own head."""

    def __init__(self, c):
        super().__init__()
        self.enorm, self.hnorm = norm(c.dim), norm(c.dim)
        self.eh_proj = Weight(matrix(c.dim, 2 * c.dim))
        self.input_layernorm, self.post_attention_layernorm = norm(c.dim), norm(c.dim)
        self.self_attn, self.block_sparse_moe = MlaAttention(c, indexer=False), Moe(c)
        self.shared_head = nn.Module()
        self.shared_head.norm, self.shared_head.head = norm(c.dim), Weight(matrix(c.vocab, c.dim))

    def forward(self, embedded, hidden, cache=None):
        """Row p: the embedding of token p + 1 (zero at p = 0) and the target's last mix at p, un-normed or normed
        without weights (the norm makes them equal). Returns y; step i + 1 takes it as its hidden state."""
        x = torch.cat([ops.rms_norm(embedded, self.enorm.weight), ops.rms_norm(hidden, self.hnorm.weight)], -1)
        x = self.eh_proj(x)
        a, kept = self.self_attn(ops.rms_norm(x, self.input_layernorm.weight), cache)
        x = x + a
        return x + self.block_sparse_moe(ops.rms_norm(x, self.post_attention_layernorm.weight)), kept

    def logits(self, y):
        return self.shared_head.head(ops.rms_norm(y, self.shared_head.norm.weight))


class DraftAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.d = d
        heads, nope, rope, v = (d[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        dim, q_rank, kv_rank = d["hidden_size"], d["q_lora_rank"], d["kv_lora_rank"]
        self.q_a_proj, self.q_a_layernorm = Weight(matrix(q_rank, dim)), norm(q_rank)
        self.q_b_proj = Weight(matrix(heads * (nope + rope), q_rank))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = Weight(matrix(kv_rank + rope, dim)), norm(kv_rank)
        self.kv_b_proj, self.o_proj = Weight(matrix(heads * (nope + v), kv_rank)), Weight(matrix(dim, heads * v))

    def rows(self, x, position):
        """Cached rows: the normed latent and the rotated pe. x [T, D]."""
        latent, pe = self.kv_a_proj_with_mqa(x).split([self.d["kv_lora_rank"], self.d["qk_rope_head_dim"]], -1)
        return (ops.rms_norm(latent.contiguous(), self.kv_a_layernorm.weight, self.d["rms_norm_eps"]),
                rotate(pe, position, self.d))

    def forward(self, x, position, context, mask):
        """x [R, D] block rows; context: rows() of the context; mask [R, C + R]."""
        d = self.d
        heads, nope = d["num_attention_heads"], d["qk_nope_head_dim"]
        latent, pe = (torch.cat(pair) for pair in zip(context, self.rows(x, position)))
        q = self.q_b_proj(ops.rms_norm(self.q_a_proj(x), self.q_a_layernorm.weight, d["rms_norm_eps"]))
        q_nope, q_pe = q.unflatten(-1, (heads, -1)).split([nope, d["qk_rope_head_dim"]], -1)
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (heads, -1)).split([nope, d["v_head_dim"]], -1)
        score = torch.einsum("rhd,chd->hrc", q_nope, k_nope)
        score = score + torch.einsum("rhd,cd->hrc", rotate(q_pe, position.unsqueeze(-1), d), pe)
        score = score.to(torch.promote_types(x.dtype, torch.float32)) * scale(d)
        p = torch.softmax(score.masked_fill(~mask, -torch.inf), -1).to(x.dtype)
        return self.o_proj(torch.einsum("hrc,chd->rhd", p, v).flatten(1))


def yarn(d, x):
    return 0.1 * d["rope_parameters"].get(x, 1.0) * math.log(d["rope_parameters"]["factor"]) + 1


def scale(d):
    plain = (d["qk_nope_head_dim"] + d["qk_rope_head_dim"])**-0.5
    return plain * yarn(d, "mscale_all_dim")**2 if d["rope_parameters"]["rope_type"] == "yarn" else plain


def rotate(x, position, d):
    """Interleaved pairs (2i, 2i + 1); position broadcasts against x without its last dimension."""
    r, dim = d["rope_parameters"], x.shape[-1]
    rate = r["rope_theta"]**(-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    size = 1.0
    if r["rope_type"] == "yarn":  # DeepSeek's form
        def turn(beta):
            return dim * math.log(r["original_max_position_embeddings"] / (beta * 2 * math.pi)) / (2 * math.log(r["rope_theta"]))
        low, high = max(0, math.floor(turn(r["beta_fast"]))), min(dim - 1, math.ceil(turn(r["beta_slow"])))
        ramp = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1).double()
        rate = rate / r["factor"] * ramp + rate * (1 - ramp)
        size = yarn(d, "mscale") / yarn(d, "mscale_all_dim")
    angle = position.double().unsqueeze(-1) * rate
    cos, sin = (angle.cos() * size).to(x.dtype), (angle.sin() * size).to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class DraftLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(d["hidden_size"]), norm(d["hidden_size"])
        self.self_attn, self.mlp = DraftAttention(d), Mlp(d["hidden_size"], d["intermediate_size"])


class DSpark(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.d, dim = d, d["hidden_size"]
        self.context_proj = Weight(matrix(dim, d["num_target_layers"] * d["target_hidden_size"]))
        self.context_norm, self.final_norm = norm(dim), norm(dim)
        self.layers = nn.ModuleList(DraftLayer(d) for _ in range(d["num_hidden_layers"]))
        self.markov_head, self.confidence_head = nn.Module(), nn.Module()
        self.markov_head.markov_w1 = Weight(torch.randn(d["vocab_size"], d["markov_rank"]) * 0.1)
        self.markov_head.markov_w2 = Weight(torch.zeros(d["vocab_size"], d["markov_rank"]))
        self.confidence_head.proj = nn.Linear(dim + d["markov_rank"], 1)

    def norm(self, x, weight):
        return ops.rms_norm(x.contiguous(), weight, self.d["rms_norm_eps"])

    def context(self, taps):
        """taps [C, m D] of positions 0..C-1 -> the cached rows of every layer."""
        c = self.norm(self.context_proj(taps), self.context_norm.weight)
        return [l.self_attn.rows(c, torch.arange(len(c))) for l in self.layers]

    def forward(self, embedded, position, context, mask):
        """Block rows (anchor, masks) -> final hidden states."""
        x = embedded
        for layer, rows in zip(self.layers, context):
            x = x + layer.self_attn(self.norm(x, layer.input_layernorm.weight), position, rows, mask)
            h = self.norm(x, layer.post_attention_layernorm.weight)
            m = layer.mlp
            x = x + m.down_proj(F.silu(m.gate_proj(h)) * m.up_proj(h))
        return self.norm(x, self.final_norm.weight)

    def bias(self, previous):
        return F.linear(self.markov_head.markov_w1.weight[previous], self.markov_head.markov_w2.weight)

    def confidence(self, hidden, previous):
        joint = torch.cat([hidden.float(), self.markov_head.markov_w1.weight[previous].float()], -1)
        return F.linear(joint, self.confidence_head.proj.weight.float(), self.confidence_head.proj.bias.float())[..., 0]


def blocks(anchors, size, tokens, length=None):
    """Positions of all rows of the blocks at `anchors`, and who reads what: the context before the anchor and the
    block's own rows up to itself. With a length the context is rows of so many tokens laid end to end, and a block
    reads its own row (rope is relative: positions may count on from row to row)."""
    position = (anchors.unsqueeze(1) + torch.arange(size)).flatten()
    owner = torch.arange(len(anchors)).repeat_interleave(size)
    at, here = torch.arange(tokens), anchors[owner].unsqueeze(-1)
    before = (at < here) & (at >= (here - here % length if length else 0))
    own = (owner.unsqueeze(1) == owner) & (position.unsqueeze(1) >= position)
    return position, torch.cat([before, own], 1)
