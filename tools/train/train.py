"""The trainer: train.py NAME [--until N] [--decay N] [--start CHECKPOINT] [--stage N] ...

Keeps WORK/NAME.pt (model, optimiser, random states, stage, hours so far) every seven minutes and at the end, and appends
curves to WORK/NAME.csv. A later call continues where the file stands. Everything counts tokens and nothing follows the
clock: on one kind of processor a run gives the same bytes again, stopped in between or not."""
import argparse
import math
import os
import random
import signal
import time

import torch
import torch.nn.functional as F

import data
import evaluate
import ops
from batches import MIX, STAGES, Sampler, loss_weights
from indexer import align, pull
from init import copy_friendly
from model import Config, Model
from optimiser import Optimiser
from tasks import ANSWER, TEXT

HERE = os.path.dirname(os.path.abspath(__file__))


def build():
    return Model(Config(HERE + "/config.json"))


def gates(model):
    return [l.block_sparse_moe.gate for l in model.model.layers if hasattr(l, "block_sparse_moe")]


def balance_loss(model):
    """Pulls probabilities towards an even load; 1 where the load is even."""
    total = 0
    for g in gates(model):
        p = g.probability / g.probability.sum(-1, keepdim=True)
        load = g.chosen.flatten(0, -2).mean(0) / g.top
        total = total + (load * p.flatten(0, -2).mean(0)).sum() * len(load)
    return total / len(gates(model))


def source_loss(trace, ids, kinds, noise, heads=2):
    """How well the first heads of every MLA layer attend to what an answer token is copied from: tokens equal to it
    whose four predecessors are alike too. Left to itself the model puts all retrieval into the KDA states, which hold
    a few facts over a few hundred tokens, and the MLA layers never start to look anything up. All other columns count exp(noise) times: in 1,024
    columns a match then has to stand out as it must among 32K."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    B, S = inputs.shape
    # A fixed number of rows, the ones without an answer masked: every new shape would compile new product kernels.
    n = max(64, min(1024 // B, 2**18 // (B * S)))
    t = torch.rand(B, S).masked_fill(kinds != ANSWER, -1.0).topk(min(n, S), -1).indices
    same = inputs.unsqueeze(1) == targets.gather(1, t).unsqueeze(-1)
    for back in range(4):
        earlier = F.pad(inputs, (1 + back, 0), value=-1)[:, :S]
        same &= earlier.unsqueeze(1) == inputs.gather(1, (t - back).clamp(min=0)).unsqueeze(-1)
    same &= torch.arange(S) <= t.unsqueeze(-1)
    rows = same.any(-1) & (kinds.gather(1, t) == ANSWER)
    weight = rows.float() / (heads * len(trace) * rows.sum().clamp(min=1))
    total = 0.0
    for _, _, _, q, k, _ in trace:
        chosen = q[:, :heads].gather(2, t[:, None, :, None].expand(-1, heads, -1, q.shape[-1]))
        total = total + ops.source(chosen, k[:, :heads].contiguous(), t, same, weight, noise)
    return total


@torch.no_grad()
def move_biases(model, step):
    for g in gates(model):
        load = g.chosen.flatten(0, -2).mean(0)
        g.e_score_correction_bias += (load.mean() - load).sign() * step


class Run:
    def __init__(self, args):
        self.path, self.args = f"{data.WORK}/{args.name}.pt", args
        torch.manual_seed(args.seed)
        self.model = build()
        copy_friendly(self.model, 1)
        for name, p in self.model.named_parameters():
            p.requires_grad_("indexer" not in name)
        self.optimiser, self.sampler = Optimiser(self.model), Sampler(args.seed)
        self.mass, self.aligned = [], False
        self.stage, self.tokens, self.seconds = 0, 0, 0.0
        source = self.path if os.path.exists(self.path) else args.start
        if source:
            self.load(torch.load(source, weights_only=False), anew=args.decay > 0 and source == args.start)
        if args.stage >= 0:
            self.stage = args.stage
        self.filler = evaluate.sentences(data.WORK + "/haystack.txt")
        self.prose = open(data.WORK + "/prose.txt").read()[:30000]
        self.load_seen, self.guide, self.scored = 0, 0.0, self.tokens // args.every
        self.csv = open(f"{data.WORK}/{args.name}.csv", "a", buffering=1)
        if self.csv.tell() == 0:
            self.csv.write("hours,tokens,length,answers_hit,answer_loss,text_loss,needle8,needle8_whole,needle1,"
                           "bits_per_byte,load_min,load_max,tokens_per_s\n")

    def load(self, state, anew):
        """anew: the indexers start again as copies of their attention, which has moved since they did."""
        self.model.load_state_dict(state["model"])
        self.optimiser.load(state["optimiser"])
        self.aligned = state.get("aligned", False) and not anew
        self.sampler.rng.setstate(state["random"])
        torch.set_rng_state(state["torch"])
        self.stage, self.tokens, self.seconds = state["stage"], state["tokens"], state["seconds"]

    def save(self):
        state = {"model": self.model.state_dict(), "optimiser": self.optimiser.state(),
                 "aligned": self.aligned,
                 "random": self.sampler.rng.getstate(), "torch": torch.get_rng_state(), "stage": self.stage,
                 "tokens": self.tokens, "seconds": self.seconds}
        torch.save(state, self.path + ".new")
        os.replace(self.path + ".new", self.path)

    def step(self, rate):
        # A quarter of the steps at a shorter length: cheaper, and the short documents stay known.
        stage, rng = STAGES[self.stage], self.sampler.rng
        if self.args.mix and stage["length"] >= self.args.mix:
            stage = rng.choices(STAGES, MIX)[0]
        elif self.stage > 2 and rng.random() < 0.25:
            stage = STAGES[rng.randrange(2, self.stage)]
        ids, kinds, cut = self.sampler.batch(stage)
        trace = [] if self.args.sources else None
        # In every fourth long step (every second one of a decay) the attention is pulled into the selection.
        pulled = self.args.indexers and stage["length"] >= self.args.indexers and \
            self.optimiser.steps % (2 if self.args.decay else 4) == 0
        hidden, _ = self.model(ids[:, :-1], mode=self.args.mode, trace=trace, cut=cut)
        narrow = 0.0
        if pulled:
            if not self.aligned:
                align(self.model, trace)
                self.aligned = True
            narrow, self.mass = pull(self.model, trace, kinds)
        guide = source_loss(trace, ids, kinds, math.log(32768 / stage["length"])) if trace else 0.0
        weights, kinds = loss_weights(kinds).flatten(), kinds.flatten()
        known = kinds.nonzero().flatten()
        rows = F.pad(known, (0, -len(known) % 256))  # a few shapes only: every new one compiles product kernels
        logits = self.model.logits(hidden.flatten(0, 1)[rows])
        weights = F.pad(weights[known], (0, len(rows) - len(known)))
        total, loss, hit = ops.cross_entropy(logits, ids[:, 1:].flatten()[rows], weights)
        balance = 0.02 if self.optimiser.steps < 200 else 0.002
        (total + balance * balance_loss(self.model) + self.args.sources * guide + narrow).backward()
        self.guide = 0.95 * self.guide + 0.05 * float(guide.detach() if torch.is_tensor(guide) else guide)
        if not torch.isfinite(total.detach()):
            raise SystemExit("the loss is not a number: the checkpoint is kept as it was")
        self.optimiser.step(rate * min(1.0, (self.optimiser.steps + 1) / 20))
        move_biases(self.model, max(0.001, 0.02 * 0.5**(self.optimiser.steps / 150)))
        self.tokens += kinds.numel()
        kinds, loss, hit = kinds[known], loss.detach()[:len(known)], hit[:len(known)]
        answers, text = kinds == ANSWER, kinds == TEXT
        self.load_seen = 0.98 * self.load_seen + 0.02 * torch.stack([g.chosen.flatten(0, -2).mean(0)
                                                                     for g in gates(self.model)])
        return [float(hit[answers].mean()) if answers.any() else 0, float(loss[answers].mean()) if answers.any() else 0,
                float(loss[text].mean()) if text.any() else 0]

    def evaluate(self, means, speed):
        stage = STAGES[self.stage]
        length = stage["length"]
        count = 4 if length < 256 else 8
        trials = max(8, min(30, 16384 // length))
        value, whole = evaluate.needle(self.model, self.filler, max(length, 256), count, trials, seed=self.tokens, mode=self.args.mode)
        single, _ = evaluate.needle(self.model, self.filler, max(length, 256), 1, max(6, trials // 3), seed=self.tokens, mode=self.args.mode)
        bits = evaluate.bits_per_byte(self.model, self.prose, min(2048, max(512, length)))
        load = self.load_seen / self.load_seen.sum(-1, keepdim=True) * 2
        row = [self.seconds / 3600, self.tokens, length, *means, value, whole, single, bits, float(load.min()),
               float(load.max()), speed]
        line = ",".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row)
        self.csv.write(line + "\n")
        print(time.strftime("%H:%M:%S"), line, flush=True)
        if value >= stage["gate"] and self.stage + 1 < len(STAGES) and length < self.args.longest:
            self.stage += 1
            print("stage", self.stage, STAGES[self.stage], flush=True)

    def go(self):
        args, stop = self.args, []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        signal.signal(signal.SIGUSR1, lambda *_: self.save())
        last = saved = time.monotonic()
        means, tokens, begin, n = [0, 0, 0], self.tokens, self.seconds, 0
        while self.tokens < args.until and not stop:
            rate = args.rate * (min(1.0, (args.until - self.tokens) / args.decay) if args.decay else 1.0)
            m = self.step(rate)
            n += 1
            means = [a + b for a, b in zip(means, m)]
            now = time.monotonic()
            self.seconds += min(now - last, 20.0)  # a pause of the process is not training time
            last = now
            speed = (self.tokens - tokens) / (self.seconds - begin)
            if n % 20 == 0:
                print(n, [round(x / n, 3) for x in means], f"sources {self.guide:.2f},", " ".join(self.mass), f"{speed:.0f} tokens/s", flush=True)
            if self.tokens // args.every > self.scored or self.tokens >= args.until:
                self.scored = self.tokens // args.every
                self.evaluate([x / n for x in means], speed)
                means, tokens, begin, n, last = [0, 0, 0], self.tokens, self.seconds, 0, time.monotonic()
            if now - saved > 420:
                self.save()
                saved = now
        self.save()
        if self.tokens < args.until:
            raise SystemExit("stopped: the same command goes on from here")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("name")
    p.add_argument("--until", type=int, default=4_000_000, help="tokens, those of --start included")
    p.add_argument("--decay", type=int, default=0, help="tokens of linear decay to zero at the end")
    p.add_argument("--rate", type=float, default=1.0)
    p.add_argument("--start", default="")
    p.add_argument("--stage", type=int, default=-1)
    p.add_argument("--longest", type=int, default=16384)
    p.add_argument("--mode", default="dense", help="dense, or sparse: through the (frozen) indexers' selections")
    p.add_argument("--sources", type=float, default=0.0, help="weight of source_loss")
    p.add_argument("--indexers", type=int, default=0, help="from rows of so many tokens on there are indexers (0: none)")
    p.add_argument("--mix", type=int, default=0, help="from the stage of this length on rows have all lengths (batches.MIX)")
    p.add_argument("--every", type=int, default=200_000, help="tokens between scores")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=1)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    ops.FAST = True
    Run(args).go()
