"""Compares this implementation with a golden K3.1 checkpoint: golden.py DIR (logits, selections; double)."""
import json
import sys

import torch

import checkpoint
from model import Config, Model


def main(folder):
    torch.set_default_dtype(torch.float64)
    model = Model(Config(folder + "/config.json"))
    model.dtype = torch.float64
    checkpoint.load(model, checkpoint.read(folder + "/model.safetensors"))
    golden = checkpoint.read(folder + "/golden.safetensors")
    worst = 0
    with torch.no_grad():
        for case in json.load(open(folder + "/golden.json"))["cases"]:
            ids = golden[case["ids"]].long().unsqueeze(0)
            trace = []
            hidden, _ = model(ids, mode="sparse", trace=trace)
            error = float((model.logits(hidden)[0] - golden[case["logits"]]).abs().max())
            # The same in two pieces, the second on the caches of the first.
            cut = ids.shape[1] // 3
            if cut:
                _, cache = model(ids[:, :cut], mode="sparse")
                later, _ = model(ids[:, cut:], cache, mode="sparse")
                error = max(error, float((later - hidden[:, cut:]).abs().max()))
            wrong = 0
            for (layer, name), (*_, chosen) in zip(case["selected"].items(), trace):
                for t, row in enumerate(golden[name].tolist()):
                    mine = range(t + 1) if chosen is None else chosen[0, t, :t + 1].nonzero().flatten().tolist()
                    wrong += list(mine) != [s for s in row if s >= 0]
            print(f"{case['name']}: logits differ by {error:.1e}, {wrong} selections differ")
            worst = max(worst, error + wrong)
    assert worst < 1e-5


if __name__ == "__main__":
    main(sys.argv[1])
