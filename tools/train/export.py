"""export.py CHECKPOINT DIR: writes a released-style checkpoint (BF16) that weft loads: model.safetensors, config.json,
the tokenizer."""
import json
import os
import shutil
import sys

import torch

import checkpoint
import data
from train import HERE, build

if __name__ == "__main__":
    source, folder = sys.argv[1:3]
    model = build()
    model.load_state_dict(torch.load(source, weights_only=False)["model"])
    os.makedirs(folder, exist_ok=True)
    checkpoint.write(folder + "/model.safetensors", checkpoint.released(model))
    json.dump(json.load(open(HERE + "/config.json")), open(folder + "/config.json", "w"), indent=1)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(f"{data.WORK}/vocab/{name}", folder)
