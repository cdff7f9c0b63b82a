"""A start that copies well. Everything below is an ordinary starting point: all of it trains freely. Without it the
same data teaches no retrieval in the same time."""
import math

import torch

from model import KdaAttention, MlaAttention


@torch.no_grad()
def copy_friendly(model, seed):
    torch.manual_seed(seed)
    c = model.c
    embed = model.model.embed_tokens.weight
    embed.normal_()
    model.lm_head.weight.copy_(embed * c.dim**-0.5)
    for layer in model.model.layers:
        a = layer.self_attn
        if isinstance(a, KdaAttention):
            width, heads = a.q_proj.weight.shape[0], c.kda_heads
            a.q_proj.weight.copy_(a.k_proj.weight)
            a.o_proj.weight.copy_(0.5 * a.v_proj.weight.t())
            for conv in (a.q_conv1d, a.k_conv1d, a.v_conv1d):
                conv.weight.normal_(std=0.02)
            taps = torch.arange(width)
            # The key is what stood one token back, two tokens back, or (last head) a third of the channels each one,
            # two and three back; the query reads the same one token later. Tap 3 is the present token.
            head, third = taps // c.kda_dim, taps % 3
            back = torch.where(head < heads - 1, 1 + head % 2, 1 + third)
            a.k_conv1d.weight[taps, 0, 3 - back] += 1
            a.q_conv1d.weight[taps, 0, 4 - back] += 1
            a.v_conv1d.weight[taps, 0, 3] += 1
            # log decay = -5 sigmoid(f + dt): rates log-uniform from 0.0015 to 1.5 nats a step.
            rate = torch.exp(torch.empty(width).uniform_(math.log(0.0015), math.log(1.5)))
            a.dt_bias.copy_(torch.logit(rate / 5))
            a.f_b_proj.weight.mul_(0.3)
        else:
            assert isinstance(a, MlaAttention)
            # Queries and keys through both low-rank factors alike: q.k then measures how alike two tokens are.
            n = min(c.q_rank, c.kv_rank)
            a.kv_a_proj_with_mqa.weight[:n].copy_(a.q_a_proj.weight[:n])
            q = a.q_b_proj.weight.view(c.heads, c.nope + c.rope, c.q_rank)
            kv = a.kv_b_proj.weight.view(c.heads, c.nope + c.v_dim, c.kv_rank)
            kv[:, :c.nope, :n].copy_(q[:, :c.nope, :n])
            v = kv[:, c.nope:].reshape(-1, c.kv_rank) @ a.kv_a_proj_with_mqa.weight[:c.kv_rank]
            a.o_proj.weight.copy_(0.5 * v.t() / (v.norm(dim=1) + 1e-6))
        ffn = layer.mlp if hasattr(layer, "mlp") else None
        if ffn is not None:
            ffn.down_proj.weight.mul_(0.3)
        else:
            layer.block_sparse_moe.routed_expert_up_proj.weight.mul_(0.3)
            layer.block_sparse_moe.shared_experts.down_proj.weight.mul_(0.3)
