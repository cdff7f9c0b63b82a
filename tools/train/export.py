"""export.py MODEL.pt DIR [--mxfp4] [--drafts DRAFTS.pt DIR]: writes released-style checkpoints (BF16): the model
with its tokenizer and, if given, the MTP layer behind the last one, the DSpark draft in DIR."""
import argparse
import json
import os
import shutil

import torch

import checkpoint
import data
from drafts import DSpark, Mtp
from train import HERE, build


def weights(path):
    return torch.load(path, weights_only=False)["model"]


QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
        "scale_dtype": "torch.uint8"}}},
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"]}
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(w):
    """[O, I] -> e2m1 codes, two a byte, the lower nibble first [O, I / 2], and E8M0 scales of 32 columns [O, I / 32].
    The scale is the smallest power of two that takes the largest value of a group into the grid."""
    groups = w.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-120)
    mantissa, exponent = torch.frexp(largest / 6)
    exponent = exponent - (mantissa == 0.5).int()  # ceil(log2)
    x = groups / torch.ldexp(torch.ones_like(largest), exponent)
    near = (x.abs().unsqueeze(-1) - GRID).abs()
    odd = torch.arange(8) % 2 * 1e-6  # of two equally near ones the even code
    code = (near + odd).argmin(-1).to(torch.uint8) + 8 * torch.signbit(x).to(torch.uint8)
    code = code.flatten(-2)
    return code[:, 0::2] + 16 * code[:, 1::2], (exponent.squeeze(-1) + 127).to(torch.uint8)


def in_mxfp4(tensors):
    out = {}
    for name, x in tensors.items():
        if ".experts." in name:
            module = name.removesuffix(".weight")
            out[module + ".weight_packed"], out[module + ".weight_scale"] = mxfp4(x)
        else:
            out[name] = x
    return out


def dump(value, path):
    with open(path, "w") as f:
        f.write(json.dumps(value, indent=1) + "\n")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model")
    p.add_argument("folder")
    p.add_argument("--mxfp4", action="store_true", help="routed experts in MXFP4 instead of BF16")
    p.add_argument("--drafts", nargs=2, default=None)
    args = p.parse_args()
    model = build()
    model.load_state_dict(weights(args.model))
    tensors = checkpoint.released(model)
    config = json.load(open(HERE + "/config.json"))
    if args.drafts:
        drafts = torch.load(args.drafts[0])
        module = Mtp(model.c)
        module.load_state_dict(drafts["mtp"])
        prefix = f"{checkpoint.PREFIX}model.layers.{model.c.layers}."
        tensors |= {prefix + n.removeprefix(checkpoint.PREFIX): x for n, x in checkpoint.released(module).items()}
        config["text_config"]["num_nextn_predict_layers"] = 1
    if args.mxfp4:
        config["text_config"]["quantization_config"] = QUANTIZATION
    os.makedirs(args.folder, exist_ok=True)
    checkpoint.write(args.folder + "/model.safetensors", in_mxfp4(tensors) if args.mxfp4 else tensors)
    dump(config, args.folder + "/config.json")
    end = [data.special("<|end_of_msg|>"), data.special("[EOS]")]
    dump({"eos_token_id": end, "temperature": 0.0}, args.folder + "/generation_config.json")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(f"{data.WORK}/vocab/{name}", args.folder)
    if args.drafts:
        config = json.load(open(HERE + "/dspark.json"))
        module = DSpark(config)
        module.load_state_dict(drafts["dspark"])
        os.makedirs(args.drafts[1], exist_ok=True)
        plain = {n.removeprefix(checkpoint.PREFIX): x for n, x in checkpoint.released(module).items()}
        checkpoint.write(args.drafts[1] + "/model.safetensors", plain)
        dump(config, args.drafts[1] + "/config.json")


if __name__ == "__main__":
    main()
