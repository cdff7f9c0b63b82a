"""A start that copies well. Everything below is an ordinary starting point: all of it trains freely. Without it the
same data teaches no retrieval in the same time."""
import math

import torch
from torch import nn

from model import MlaAttention


@torch.no_grad()
def copy_friendly(model, seed):
    torch.manual_seed(seed)
    c = model.c
    embed = model.model.embed_tokens.weight
    embed.normal_(std=0.4)  # small beside the slots of last_tokens, which share its dimensions
    model.lm_head.weight.copy_(embed * (c.dim**-0.5 / 0.4))
    slots = last_tokens(model.model.layers[0].self_attn, c)
    for layer in model.model.layers:
        a = layer.self_attn
        if isinstance(a, MlaAttention):
            match_before(a, c, slots)
        elif layer is not model.model.layers[0]:
            copy_after(a, c)
        ffn = layer.mlp if hasattr(layer, "mlp") else None
        if ffn is not None:
            ffn.down_proj.weight.mul_(0.15)
        else:
            layer.block_sparse_moe.routed_expert_up_proj.weight.mul_(0.1)
            layer.block_sparse_moe.shared_experts.down_proj.weight.mul_(0.15)


@torch.no_grad()
def last_tokens(a, c):
    """Layer 0 hands on the last four tokens: head j decays at once and its value is the token j back, so its output
    is that token in 64 dimensions of its own. Returns the matrices [64, D] that read them."""
    width, n = a.q_proj.weight.shape[0], c.kda_dim
    a.q_proj.weight.copy_(a.k_proj.weight)
    a.v_proj.weight.copy_(a.v_proj.weight[:n].repeat(c.kda_heads, 1))
    a.g_proj.weight.mul_(0.3)
    taps = torch.arange(width)
    for conv in (a.q_conv1d, a.k_conv1d, a.v_conv1d):
        conv.weight.normal_(std=0.02)
    a.q_conv1d.weight[taps, 0, 3] += 1
    a.k_conv1d.weight[taps, 0, 3] += 1
    a.v_conv1d.weight[taps, 0, 3 - taps // n] += 1
    a.dt_bias.fill_(4.0)
    a.f_b_proj.weight.mul_(0.3)
    nn.init.orthogonal_(a.o_proj.weight, 2.0)
    return [a.o_proj.weight[:, j * n:(j + 1) * n].t() / 2 for j in range(c.kda_heads)]


@torch.no_grad()
def copy_after(a, c):
    """Reads what stood behind the present token the last time: the key is one or two tokens back (last head: a third
    of the channels each one, two and three back), the query the same one token later. Tap 3 is the present token."""
    width, heads = a.q_proj.weight.shape[0], c.kda_heads
    a.q_proj.weight.copy_(a.k_proj.weight)
    a.o_proj.weight.copy_(0.25 * a.v_proj.weight.t())
    for conv in (a.q_conv1d, a.k_conv1d, a.v_conv1d):
        conv.weight.normal_(std=0.02)
    taps = torch.arange(width)
    head, third = taps // c.kda_dim, taps % 3
    back = torch.where(head < heads - 1, 1 + head % 2, 1 + third)
    a.k_conv1d.weight[taps, 0, 3 - back] += 1
    a.q_conv1d.weight[taps, 0, 4 - back] += 1
    a.v_conv1d.weight[taps, 0, 3] += 1
    # log decay = -5 sigmoid(f + dt): rates log-uniform from 0.006 to 1.5 nats a step: a memory of the
    # question, not of the document, which is for the MLA layers to look up.
    rate = torch.exp(torch.empty(width).uniform_(math.log(0.006), math.log(1.5)))
    a.dt_bias.copy_(torch.logit(rate / 5))
    a.f_b_proj.weight.mul_(0.3)


@torch.no_grad()
def match_before(a, c, slots):
    """Attends to tokens whose three predecessors are like the present three tokens, and copies them. Without this
    start the MLA layers learn no retrieval at all for a long time: the KDA states do, as long as they can."""
    each = c.kv_rank * 2 // 9  # dimensions of one predecessor in the latent; the rest holds the token itself
    used, own = 3 * each, c.kv_rank - 3 * each
    mix = torch.randn(each, slots[0].shape[0]) / slots[0].shape[0]**0.5
    now, before = (torch.cat([mix @ slots[j + shift] for j in range(3)]) for shift in (0, 1))
    shared = torch.randn(c.rope, used) / used**0.5
    read = torch.randn(own, c.dim) / c.dim**0.5
    a.q_a_proj.weight[:used] = now
    a.kv_a_proj_with_mqa.weight.copy_(torch.cat([before, read, shared @ before * 2]))
    q = a.q_b_proj.weight.view(c.heads, c.nope + c.rope, c.q_rank)
    kv = a.kv_b_proj.weight.view(c.heads, c.nope + c.v_dim, c.kv_rank)
    q.mul_(0.2)
    kv[:, :c.nope] *= 0.2
    for h in range(c.heads):
        alike = torch.randn(c.nope, used) / used**0.5
        q[h, :c.nope, :used] += 1.5 * alike
        q[h, c.nope:, :used] += 1.5 * shared
        kv[h, :c.nope, :used] += alike
        value = torch.randn(c.v_dim, own) / own**0.5
        kv[h, c.nope:] = 0.0
        kv[h, c.nope:, used:] = value
        a.o_proj.weight[:, h * c.v_dim:(h + 1) * c.v_dim] = 0.5 * (value @ read).t()
    a.g_proj.weight.mul_(0.3)
