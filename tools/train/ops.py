"""Fused operations of the trainer: each a plain PyTorch form (any dtype, the definition) and a C++ form
(bf16 activations on one core, ops.cpp and kda.cpp). FAST chooses; `python3 ops.py` compares the two."""
import ctypes
import os
import subprocess

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.environ.get("WEFT_TRAIN_DIR", "/tmp/weft-train")
FAST = False


def library(name):
    source, target = f"{HERE}/{name}.cpp", f"{BUILD}/lib{name}.so"
    os.makedirs(BUILD, exist_ok=True)
    if not os.path.exists(target) or os.path.getmtime(target) < max(map(os.path.getmtime, (source, HERE + "/numbers.h"))):
        subprocess.run(["g++", "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC", source, "-o",
                        target + ".new"], check=True)
        os.replace(target + ".new", target)
    return ctypes.CDLL(target)


LIBRARIES = {}


def argument(x):
    if isinstance(x, torch.Tensor):
        assert x.is_contiguous()
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, list):
        return (ctypes.c_void_p * len(x))(*[y.data_ptr() for y in x])
    return ctypes.c_int64(x) if isinstance(x, int) else ctypes.c_float(x) if isinstance(x, float) else x


def run(name, *arguments):
    """Calls a C function; it must be this one's arguments that hold the tensors, or a temporary would be gone."""
    file = name.split("_")[0] if name.startswith(("kda", "muon")) else "ops"
    if file not in LIBRARIES:
        LIBRARIES[file] = library(file)
    getattr(LIBRARIES[file], name)(*[argument(x) for x in arguments])


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float32)


def empty(*shape):
    return torch.empty(*shape, dtype=torch.float32)


# Attention-Residual mix and the RMSNorm behind it --------------------------------------------------------------

def mix_reference(sources, key, gamma, eps_mix, eps_norm):
    if len(sources) == 1:
        x = sources[0]
    else:
        v = torch.stack(sources, -2)
        logit = (v * key).sum(-1) * torch.rsqrt(v.pow(2).mean(-1) + eps_mix)
        x = (torch.softmax(logit, -1).unsqueeze(-1) * v).sum(-2)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps_norm) * gamma


class Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key, gamma, eps_mix, eps_norm, *sources):
        sources = [s.contiguous() for s in sources]
        dim = sources[0].shape[-1]
        rows, n = sources[0].numel() // dim, len(sources)
        key, gamma = key.float().contiguous(), gamma.float().contiguous()
        out = torch.empty_like(sources[0])
        weight, inverse, final = empty(rows, n), empty(rows, n), empty(rows)
        run("mix_forward", rows, dim, n, sources, key, gamma, eps_mix, eps_norm, out, weight, inverse, final)
        ctx.save_for_backward(key, gamma, weight, inverse, final, *sources)
        return out

    @staticmethod
    def backward(ctx, dout):
        key, gamma, weight, inverse, final, *sources = ctx.saved_tensors
        dim = sources[0].shape[-1]
        rows, n = sources[0].numel() // dim, len(sources)
        dsrc, dkey, dgamma = [torch.empty_like(s) for s in sources], zeros(dim), zeros(dim)
        run("mix_backward", rows, dim, n, sources, key, gamma, weight, inverse, final, dout.contiguous(), dsrc, dkey, dgamma)
        return dkey, dgamma, None, None, *dsrc


def mix(sources, key, gamma, eps_mix=1e-5, eps_norm=1e-5):
    if FAST:
        return Mix.apply(key, gamma, eps_mix, eps_norm, *sources)
    return mix_reference(sources, key, gamma, eps_mix, eps_norm)


def rms_norm(x, gamma, eps=1e-5):
    return mix([x], gamma, gamma, 1e-5, eps)


# SiTU with routing weights -------------------------------------------------------------------------------------

def situ_reference(gu, route):
    g, u = gu.chunk(2, -1)
    h = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
    return h if route is None else (h.unflatten(-1, (route.shape[-1], -1)) * route.unsqueeze(-1)).flatten(-2)


class Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gu, route):
        width = gu.shape[-1] // 2
        rows = gu.numel() // (2 * width)
        experts = 1 if route is None else route.shape[-1]
        gu, route = gu.contiguous(), None if route is None else route.float().contiguous()
        out = gu.new_empty(*gu.shape[:-1], width)
        run("situ_forward", rows, width, experts, gu, route, out)
        ctx.save_for_backward(gu, route)
        return out

    @staticmethod
    def backward(ctx, dout):
        gu, route = ctx.saved_tensors
        width = gu.shape[-1] // 2
        rows = gu.numel() // (2 * width)
        dgu, droute = torch.empty_like(gu), None if route is None else torch.empty_like(route)
        run("situ_backward", rows, width, 1 if route is None else route.shape[-1], gu, route, dout.contiguous(), dgu, droute)
        return dgu, droute


def situ(gu, route=None):
    return Situ.apply(gu, route) if FAST else situ_reference(gu, route)


# Cross-entropy --------------------------------------------------------------------------------------------------

class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, weight):
        logits = logits.contiguous()  # overwritten by its gradient
        rows, vocab = logits.shape
        loss, hit = empty(rows), empty(rows)
        run("cross_entropy", rows, vocab, logits, target.contiguous(), weight.float().contiguous(), loss, hit)
        ctx.save_for_backward(logits)
        ctx.mark_non_differentiable(hit)
        return (loss * weight).sum(), loss, hit

    @staticmethod
    def backward(ctx, dsum, _, __):
        return ctx.saved_tensors[0] * dsum.to(torch.bfloat16) if float(dsum) != 1 else ctx.saved_tensors[0], None, None


def cross_entropy(logits, target, weight):
    """sum(weight * loss), and per token the loss and whether the target is the largest logit."""
    if FAST:
        return CrossEntropy.apply(logits, target, weight)
    loss = F.cross_entropy(logits, target, reduction="none")
    return (loss * weight).sum(), loss.detach(), (logits.argmax(-1) == target).float()


# KDA ------------------------------------------------------------------------------------------------------------

def kda_reference(proj, f, conv, alog, dt, onorm, state=None, cut=None):
    """proj [B, lead + T, 4P + H] = q | k | v | gate | beta before everything (lead: up to three earlier tokens for
    the convolution), f [B, T, P] the decay input, conv [3, 4, P], onorm [head dim], state [B, H, K, V] before the
    first token, cut [B, T] booleans: the state is forgotten before such a token. Returns the gated, normed output [B, T, P] and the state after the last token."""
    heads, dim = proj.shape[-1] - 4 * f.shape[-1], onorm.shape[0]
    width, steps = heads * dim, f.shape[1]
    lead = proj.shape[1] - steps
    parts = proj.split([width] * 4 + [heads], -1)

    def short_conv(x, w):
        x = F.pad(x, (0, 0, 3 - lead, 0))
        y = sum(x[:, j:j + steps] * w[j] for j in range(4))
        return F.silu(y).unflatten(-1, (heads, dim))

    q, k, v = (short_conv(parts[i], conv[i]) for i in range(3))
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay = torch.exp(-5 * torch.sigmoid(alog[:heads].exp().unsqueeze(-1) * (f + dt).unflatten(-1, (heads, dim))))
    if cut is not None:
        decay = decay * ~cut[:, :, None, None]
    beta = torch.sigmoid(parts[4][:, lead:]).unsqueeze(-1)
    S = q.new_zeros(q.shape[0], heads, dim, dim) if state is None else state
    out = []
    for t in range(steps):
        S = S * decay[:, t].unsqueeze(-1)
        e = beta[:, t] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t].unsqueeze(-1) * e.unsqueeze(-2)
        out.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * dim**-0.5)
    o = torch.stack(out, 1)
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * onorm
    return o.flatten(-2) * torch.sigmoid(parts[3][:, lead:]), S


class Kda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, proj, f, conv, alog, dt, onorm, state, cut):
        proj, f = proj.contiguous(), f.contiguous()
        batch, time, width = f.shape
        heads = width // 64
        small = [x.float().contiguous() for x in (conv, alog, dt, onorm)]
        saved = empty(batch, heads, (time + 31) // 32, 64, 64) if any(ctx.needs_input_grad) else None
        out = torch.empty_like(f)
        state = zeros(batch, heads, 64, 64) if state is None else state.clone()
        run("kda_forward", batch, time, heads, proj.shape[-1], proj.shape[1] - time, proj, f, *small, cut, state, saved, out)
        ctx.save_for_backward(proj, f, saved, cut, *small)
        ctx.mark_non_differentiable(state)
        return out, state

    @staticmethod
    def backward(ctx, dout, _):
        proj, f, saved, cut, *small = ctx.saved_tensors
        batch, time, width = f.shape
        dproj, df, dsmall = (torch.zeros_like if proj.shape[1] > time else torch.empty_like)(proj), torch.empty_like(f), [torch.zeros_like(x) for x in small]
        run("kda_backward", batch, time, width // 64, proj.shape[-1], proj.shape[1] - time, proj, f, *small, cut, saved, dout.contiguous(), dproj, df, *dsmall)
        return dproj, df, *dsmall, None, None


def kda(proj, f, conv, alog, dt, onorm, state=None, cut=None):
    """The C++ form takes state and history as constants: no gradient flows into an earlier segment."""
    return (Kda.apply if FAST else kda_reference)(proj, f, conv, alog, dt, onorm, state, cut)


# Attention ------------------------------------------------------------------------------------------------------

def visible(first, rows, columns):
    """[rows, columns]: column s may be read by row t, which is token first + t."""
    return torch.arange(columns) <= torch.arange(first, first + rows).unsqueeze(-1)


def attend_reference(q, k, v, selected=None):
    """Causal attention of the last T of S tokens: q [B, H, T, d], k and v [B, H, S, d], selected [B, T, S] or None."""
    T, S = q.shape[2], k.shape[2]
    mask = visible(S - T, T, S)
    if selected is not None:
        mask = mask & selected.unsqueeze(1)
    score = (q @ k.transpose(-1, -2) * q.shape[-1]**-0.5).masked_fill(~mask, -torch.inf)
    return torch.softmax(score, -1) @ v


ROWS = 512


class Attend(torch.autograd.Function):
    """Row blocks of 512 queries against the columns they can see, probabilities recomputed in the backward pass:
    three times the speed of torch's flash attention here, whose backward pass does not use AMX."""

    @staticmethod
    def probabilities(q, k, selected, row, first):
        end = min(row + ROWS, q.shape[2])
        B, H, _, d = q.shape
        qb, kb = q[:, :, row:end].flatten(0, 1), k[:, :, :first + end].flatten(0, 1)
        p = torch.bmm(qb, kb.transpose(1, 2))
        chosen = None if selected is None else selected[:, row:end, :first + end].contiguous()
        run("softmax_rows", B * H, H, end - row, first + end, first + row, d**-0.5, chosen, p)
        return end, qb, kb, p

    @staticmethod
    def forward(ctx, q, k, v, selected):
        B, H, T, d = q.shape
        first = k.shape[2] - T
        out = torch.empty_like(q)
        for row in range(0, T, ROWS):
            end, _, _, p = Attend.probabilities(q, k, selected, row, first)
            out[:, :, row:end] = torch.bmm(p, v[:, :, :first + end].flatten(0, 1)).view(B, H, end - row, d)
        ctx.save_for_backward(q, k, v, out, selected)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, selected = ctx.saved_tensors
        B, H, T, d = q.shape
        first = k.shape[2] - T
        one = T <= ROWS and first == 0  # then nothing has to be added up
        dq = torch.empty_like(q)
        dk, dv = (None, None) if one else (torch.zeros(k.shape), torch.zeros(v.shape))
        delta = (dout.float() * out.float()).sum(-1)
        for row in range(0, T, ROWS):
            end, qb, kb, p = Attend.probabilities(q, k, selected, row, first)
            do = dout[:, :, row:end].flatten(0, 1)
            ds = torch.bmm(do, v[:, :, :first + end].flatten(0, 1).transpose(1, 2))
            dvb = torch.bmm(p.transpose(1, 2), do).view(B, H, first + end, -1)
            run("softmax_rows_backward", B * H * (end - row), end - row, first + end, first + row, d**-0.5, p, delta[:, :, row:end].contiguous(), ds)
            dq[:, :, row:end] = torch.bmm(ds, kb).view(B, H, end - row, d)
            dkb = torch.bmm(ds.transpose(1, 2), qb).view(B, H, first + end, d)
            if one:
                dk, dv = dkb, dvb
            else:
                dk[:, :, :first + end] += dkb
                dv[:, :, :first + end] += dvb
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


def attend(q, k, v, selected=None):
    return Attend.apply(q, k, v, selected) if FAST else attend_reference(q, k, v, selected)


class Source(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, last, same, weight, noise):
        B, H, T, d = q.shape
        g = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))  # scores, then their gradients
        loss = zeros(B, T)
        run("source_rows", B, H, T, k.shape[2], d**-0.5, noise, last, weight, same, g, loss)
        ctx.save_for_backward(q, k, g)
        return (loss * weight).sum()

    @staticmethod
    def backward(ctx, dout):
        q, k, g = ctx.saved_tensors
        g = g * dout.to(g.dtype)
        return (torch.bmm(g, k.flatten(0, 1)).view_as(q), torch.bmm(g.transpose(1, 2), q.flatten(0, 1)).view_as(k),
                None, None, None, None)


def source_reference(q, k, last, same, weight, noise):
    score = q @ k.transpose(2, 3) * q.shape[-1]**-0.5 + noise * ~same.unsqueeze(1)
    score = score.masked_fill((torch.arange(k.shape[2]) > last.unsqueeze(-1)).unsqueeze(1), -torch.inf)
    part = torch.logsumexp(score.masked_fill(~same.unsqueeze(1), -torch.inf), -1)
    return ((torch.logsumexp(score, -1) - part).sum(1) * weight).sum()


def source(q, k, last, same, weight, noise):
    """Sum over heads and rows of weight * -log(share of the columns `same` in the soft-max of q k', all others counted
    exp(noise) times). q [B, H, T, d], k [B, H, S, d]; last, weight [B, T]; same [B, T, S], within 0 .. last."""
    return (Source.apply if FAST else source_reference)(q, k, last, same, weight, noise)


def select(q, weight, key, top):
    """q [T, H, d], weight [T, H], key [S, d] -> [T, S] booleans, the top best of the visible columns."""
    T, S = len(q), len(key)
    chosen = torch.zeros(T, S, dtype=torch.bool)
    weight = weight.float().contiguous()
    for row in range(0, T, ROWS):
        end = min(row + ROWS, T)
        columns = S - T + end
        dot = torch.matmul(q[row:end].transpose(0, 1), key[:columns].t()).contiguous()
        block = torch.empty(end - row, columns, dtype=torch.bool)
        run("select_rows", q.shape[1], end - row, columns, S - T + row, top, dot, weight[row:end].contiguous(), block)
        chosen[row:end, :columns] = block
    return chosen


def test():
    """Largest error of every output and gradient of the C++ forms, relative to the rms of the exact value."""
    global FAST
    torch.manual_seed(0)

    def compare(name, fn, inputs, rounded):
        leaves = [x.to(torch.bfloat16 if i in rounded else torch.float32) for i, x in enumerate(inputs)]
        exact = [x.double().requires_grad_() for x in leaves]
        fast = [x.clone().requires_grad_() for x in leaves]
        global FAST
        FAST = False
        want = fn(*exact)
        seed = torch.randn_like(want)
        want.backward(seed)
        FAST = True
        got = fn(*fast)
        got.backward(seed.to(got.dtype))
        pairs = [(got.detach(), want.detach())] + [(a.grad, b.grad) for a, b in zip(fast, exact)]
        errors = [float((a.double() - b).pow(2).mean().sqrt() / b.pow(2).mean().sqrt()) for a, b in pairs]
        print(name, " ".join(f"{e:.1e}" for e in errors))
        assert max(errors) < 1e-2, name

    r = torch.randn
    state, cut = r(2, 2, 64, 64) * 0.3, torch.arange(150).view(2, 75) % 29 == 5
    compare("mix1", lambda a, g: mix([a], g, g), [r(50, 256), r(256)], {0})
    compare("mix3", lambda a, b, c, k, g: mix([a, b, c], k, g),
            [r(50, 256), r(50, 256), r(50, 256), r(256) * 0.2, r(256)], {0, 1, 2})
    compare("situ", lambda x, w: situ(x, w * (w > 0)), [r(50, 1024) * 4, (torch.rand(50, 8) * (torch.rand(50, 8) < 0.5))], {0})
    compare("situ1", lambda x: situ(x), [r(50, 1024) * 4], {0})
    compare("situ, far out", lambda x: situ(x), [r(50, 1024) * 300], {0})
    compare("kda, far out", lambda *x: kda(*x)[0], [r(2, 75, 4 * 128 + 2) * 100, r(2, 75, 128) * 300,
                                                   r(3, 4, 128) * 0.5, r(2) * 0.3, r(128) - 2, 1 + 0.1 * r(64)], {0, 1})
    compare("kda", lambda *x: kda(*x)[0], [r(2, 75, 4 * 128 + 2), r(2, 75, 128) * 2, r(3, 4, 128) * 0.5, r(2) * 0.3, r(128) - 2,
                         1 + 0.1 * r(64)], {0, 1})
    compare("kda, later segment", lambda p, f, *x: kda(torch.cat([p[:, :3].detach(), p[:, 3:]], 1), f, *x,
                                                      state=state.to(x[0].dtype), cut=cut)[0],
            [r(2, 78, 4 * 128 + 2), r(2, 75, 128) * 2, r(3, 4, 128) * 0.5, r(2) * 0.3, r(128) - 2,
             1 + 0.1 * r(64)], {0, 1})
    compare("attend", attend, [r(2, 3, 700, 64), r(2, 3, 800, 64), r(2, 3, 800, 64)], {0, 1, 2})
    some = torch.rand(2, 700, 800) < 0.1
    some[:, :, 0] = True
    compare("attend selected", lambda *x: attend(*x, some), [r(2, 3, 700, 64), r(2, 3, 800, 64), r(2, 3, 800, 64)],
            {0, 1, 2})
    last = torch.randint(20, 800, (2, 40))
    same = (torch.rand(2, 40, 800) < 0.02) & (torch.arange(800) <= last.unsqueeze(-1))
    same[:, :, 0] = True
    compare("source", lambda q, k: source(q, k, last, same, (last % 3 / 3.0).float(), 2.0),
            [r(2, 3, 40, 64), r(2, 3, 800, 64)], {0, 1})
    q, weight, key = r(600, 8, 32).bfloat16(), r(600, 8), r(700, 32).bfloat16()
    dot = torch.relu(torch.einsum("thd,sd->ths", q, key)).float()
    score = (dot * weight.unsqueeze(-1)).sum(1).masked_fill(~visible(100, 600, 700), -torch.inf)
    want = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, torch.topk(score, 50, -1).indices, True)
    agree = float((select(q, weight, key, 50) & want).sum() / want.sum())
    print("select agrees", agree)
    assert agree > 0.995


if __name__ == "__main__":
    test()
