"""export.py MODEL.pt DIR [--drafts DRAFTS.pt DIR]: writes released-style checkpoints (BF16): the model
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


def dump(value, path):
    with open(path, "w") as f:
        f.write(json.dumps(value, indent=1) + "\n")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model")
    p.add_argument("folder")
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
    os.makedirs(args.folder, exist_ok=True)
    checkpoint.write(args.folder + "/model.safetensors", tensors)
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
