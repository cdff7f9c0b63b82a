"""golden_drafts.py GOLDENS: compares both drafts with kimi_k3-tiny-mtp and kimi_k31-tiny-dspark-causal (double)."""
import json
import sys

import torch
import torch.nn.functional as F

import checkpoint
from drafts import DSpark, Mtp, blocks
from model import Config


def mtp(folder, config):
    c = Config(config)  # the MTP golden is K3's; shapes are the same
    tensors = {k.removeprefix("language_model.model.layers.9."): v
               for k, v in checkpoint.read(folder + "/model.safetensors").items() if "layers.9." in k}
    module = Mtp(c)
    checkpoint.load(module, tensors)
    golden, worst = checkpoint.read(folder + "/golden.safetensors"), 0
    for case in json.load(open(folder + "/golden.json"))["cases"]:
        n = case["name"]
        ids = torch.tensor(case["ids"][1:] + [case["anchor"]])
        embedded = F.embedding(ids, tensors["embed_tokens.weight"].double()).clone()
        embedded[0] = 0
        y, _ = module(embedded.unsqueeze(0), golden[n + ".target_hidden"].double().unsqueeze(0))
        worst = max(worst, float((module.logits(y)[0] - golden[n + ".step0_logits"]).abs().max()))
    print(f"MTP: logits differ by {worst:.1e}")
    assert worst < 1e-5


def dspark(folder, target):
    d = json.load(open(folder + "/config.json"))
    module = DSpark(d)
    checkpoint.load(module, checkpoint.read(folder + "/model.safetensors"))
    embed = checkpoint.read(target + "/model.safetensors")["language_model.model.embed_tokens.weight"].double()
    golden, worst = checkpoint.read(folder + "/golden.safetensors"), 0
    for case in json.load(open(folder + "/golden.json"))["cases"]:
        name, n = case["name"], len(case["ids"])
        ids = torch.tensor([case["anchor"]] + [d["mask_token_id"]] * (d["block_size"] - 1))
        taps = golden[name + ".taps_attn_res"].double().flatten(1)
        position, mask = blocks(torch.tensor([n]), d["block_size"], n)
        h = module(embed[ids], position, module.context(taps), mask)
        worst = max(worst, float((h - golden[name + ".hidden"]).abs().max()))
        previous = torch.tensor([case["anchor"]] + case["draft_tokens"][:-1])
        bias = golden[name + ".logits"].double() - golden[name + ".base_logits"].double()
        worst = max(worst, float((module.bias(previous) - bias).abs().max()))
        sure = torch.sigmoid(module.confidence(h, previous))
        worst = max(worst, float((sure - golden[name + ".confidence"].flatten()).abs().max()))
    print(f"DSpark: hidden states, biases and confidences differ by {worst:.1e}")
    assert worst < 1e-5


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    root = sys.argv[1]
    with torch.no_grad():
        mtp(root + "/kimi_k3-tiny-mtp", root + "/kimi_k31-tiny/config.json")
        dspark(root + "/kimi_k31-tiny-dspark-causal", root + "/kimi_k31-tiny")
