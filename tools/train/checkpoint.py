"""Released tensor names and safetensors files: reads any K3.1 checkpoint of BF16 weights, writes ours."""
import json
import re
import struct

import torch

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32, "U8": torch.uint8, "F16": torch.float16,
          "I64": torch.int64}
PREFIX = "language_model."


def read(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8:8 + size])
    out = {}
    for name, entry in head.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = bytearray(data[8 + size + begin:8 + size + end])
        out[name] = torch.frombuffer(raw, dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
    return out


def write(path, tensors):
    names = {v: k for k, v in DTYPES.items()}
    head, offset, blobs = {}, 0, []
    for name, x in tensors.items():
        blob = x.contiguous().view(torch.uint8).numpy().tobytes()
        head[name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def released(model):
    """The model's tensors under their released names and types."""
    out = {}
    for name, x in model.state_dict().items():
        x = x.detach()
        wide = re.search(r"A_log|dt_bias|e_score_correction_bias|conv1d|o_norm", name)
        x = x.float() if wide else x.to(torch.bfloat16)
        if name.endswith("experts.w13"):
            for e in range(x.shape[1]):
                for part, w in zip((0, 1), ("w1", "w3")):
                    out[PREFIX + name[:-3] + f"{e}.{w}.weight"] = x[part, e]
        elif name.endswith("experts.w2"):
            for e in range(x.shape[0]):
                out[PREFIX + name[:-2] + f"{e}.w2.weight"] = x[e]
        else:
            out[PREFIX + name] = x
    return out


def load(model, tensors):
    """The inverse of released(): every parameter must be there, padding behind A_log is cut."""
    tensors = {name.removeprefix(PREFIX): x for name, x in tensors.items()}
    for name, x in model.state_dict().items():
        if name.endswith("experts.w13"):
            parts = [[tensors[name[:-3] + f"{e}.{w}.weight"] for e in range(x.shape[1])] for w in ("w1", "w3")]
            value = torch.stack([torch.stack(p) for p in parts])
        elif name.endswith("experts.w2"):
            value = torch.stack([tensors[name[:-2] + f"{e}.w2.weight"] for e in range(x.shape[0])])
        else:
            value = tensors[name]
        if name.endswith("A_log"):
            value = value.flatten()[:x.shape[0]]
        x.copy_(value)
