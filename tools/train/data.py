"""Corpus and vocabulary.

    data.py corpus    Debian packages (apt-get download) -> corpus.jsonl, prose.txt, haystack.txt
    data.py vocab     -> vocab/tiktoken.model, tokenizer_config.json
    data.py encode    -> train.u16: the training documents as tokens, [EOS] between them

Everything lies in WEFT_TRAIN_DIR. Documents are told apart by content, not by path: the packages link their folders
into each other, and a copy of a held-out document in the training text would spoil every figure."""
import base64
import glob
import gzip
import hashlib
import html
import json
import os
import random
import re
import subprocess
import sys

import numpy as np

WORK = os.environ.get("WEFT_TRAIN_DIR", "/tmp/weft-train")
RANKS, SPECIAL = 4864, 256
# Moonshot's split expression, its set intersections written as complements.
SPLIT = (r"[\p{Han}]+"
         r"|[^\r\n\p{L}\p{N}]?[^\p{Ll}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{Han}]*[^\p{Lu}\p{Lt}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{Han}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[^\p{Ll}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{Han}]+[^\p{Lu}\p{Lt}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{Han}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# Offsets behind the ranks, as in the release.
NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
         6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]", 254: "[UNK]", 255: "[PAD]"}
PLAIN = {"<|open|>", "<|close|>", "<|sep|>"}  # not flagged special, as in the release
# Pieces of the chat format that are encoded by themselves: one token each.
CHAT = ["message", " role", "=\"", "user", "assistant", "system", "think", "response", " type", "thinking", "-effort",
        "max", "low", "high", "medium", " thinking", "_effort"]

# package, files, and the licence as the package states it (the model card repeats this list)
SOURCES = [
    ("python3.11-doc", "doc/python3.11/html/_sources/**/*.txt", "PSF-2"),
    ("postgresql-doc-15", "doc/postgresql-doc-15/html/*.html", "PostgreSQL"),
    ("apache2-doc", "doc/apache2-doc/manual/en/**/*.html", "Apache-2.0"),
    ("git-doc", "doc/git-doc/**/*.txt", "GPL-2"),
    ("vim-runtime", "vim/vim90/doc/*.txt*", "Vim"),
    ("perl-doc", "perl/5.36.0/pod/*.pod", "Artistic or GPL-1+"),
    ("manpages, manpages-dev", "man/man*/*.gz", "Linux man-pages licences"),
    ("debian-handbook", "doc/debian-handbook/html/en-US/*.html", "GPL-2+ or CC-BY-SA-3.0"),
    ("debian-policy", "doc/debian-policy/policy.html/_sources/*.txt", "GPL-2+"),
    ("debian-faq", "doc/debian/FAQ/*.en.html", "GPL-2+ style notice"),
    ("debian-reference-en", "debian-reference/*.en.html", "GPL-2+"),
    ("developers-reference", "developers-reference/_sources/*.txt", "GPL-2+"),
    ("dict-jargon", "dictd/jargon.dict.dz", "public domain"),
    ("cmake-doc", "doc/cmake-data/html/_sources/**/*.txt", "BSD-3-Clause"),
    ("exim4-doc-html", "doc/exim4-doc-html/**/*.html", "GPL-2+"),
    ("linux-doc-6.1", "doc/linux-doc-6.1/html/_sources/**/*.txt*", "GPL-2"),
]
HELD_OUT = {"python3.11-doc", "postgresql-doc-15", "apache2-doc"}  # permissive: their held-out files are shipped


def from_html(text):
    text = re.sub(r"(?is)<(script|style|head|nav)\b.*?</\1>", " ", text)
    body = re.search(r'(?is)<(?:div|main)[^>]*(?:id="page-content"|role="main")[^>]*>(.*)', text)
    text = body.group(1) if body else text
    parts = re.split(r"(?is)(<pre\b.*?</pre>)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"\s+", " ", parts[i])
        parts[i] = re.sub(r"(?i)<li\b[^>]*>", "\n* ", parts[i])
        parts[i] = re.sub(r"(?i)</?(p|div|h\d|tr|table|ul|ol|dl|dt|dd|br|section)\b[^>]*>", "\n", parts[i])
    return html.unescape(re.sub(r"<[^>]+>", "", "\n".join(parts)))


def from_man(text):
    out = []
    for line in text.splitlines():
        if line.startswith((".\\\"", "'\\\"", ".de", ".ie", ".el", ".if", ".nr")):
            continue
        head = re.match(r"\.(SH|SS|TP|PP|IP|B|I|BR|BI|RB|RI|IB|IR|TH)\b ?(.*)", line)
        if head:
            kind, rest = head.groups()
            join = "" if len(kind) == 2 and kind[0] in "BRI" and kind[1] in "BRI" else " "
            words = re.findall(r'"([^"]*)"|(\S+)', rest)
            rest = join.join(a or b for a, b in words)
            out.append("\n" + rest if kind in ("SH", "SS", "PP", "TP", "IP") else rest)
        elif not line.startswith("."):
            out.append(line)
    text = "\n".join(out)
    text = re.sub(r"\\f[BIRP]|\\f\(..|\\&|\\/|\\,", "", text)
    return text.replace("\\-", "-").replace("\\e", "\\").replace("\\(aq", "'").replace("\\(em", "--")


def from_pod(text):
    text = re.sub(r"(?m)^=(head\d|item|over|back|cut|encoding|pod|for|begin|end)\b ?", "", text)
    return re.sub(r"[BICFLSX]<+\s?([^<>]*?)\s?>+", r"\1", text)


def read_document(path):
    data = open(path, "rb").read()
    if path.endswith((".gz", ".dz")):
        data = gzip.decompress(data)
    text = data.decode("utf-8", "ignore")
    kind = re.sub(r"\.gz$", "", path)
    if kind.endswith(".html"):
        text = from_html(text)
    elif "/man/" in path:
        text = from_man(text)
    elif kind.endswith(".pod"):
        text = from_pod(text)
    text = re.sub(r"[ \t]+\n", "\n", text.replace("\r", "").replace("\t", "    "))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def corpus():
    root = WORK + "/root/usr/share/"
    if not os.path.isdir(root):
        os.makedirs(WORK + "/debs", exist_ok=True)
        names = sorted({n for p, _, _ in SOURCES for n in p.split(", ")} | {"cmake-data"})
        subprocess.run(["apt-get", "download", *names], cwd=WORK + "/debs", check=True)
        for deb in glob.glob(WORK + "/debs/*.deb"):
            subprocess.run(["dpkg-deb", "-x", deb, WORK + "/root"], check=True)
    seen, documents = set(), []
    for package, pattern, licence in SOURCES:
        size = 0
        for path in sorted({os.path.realpath(p) for p in glob.glob(root + pattern, recursive=True)}):
            if not os.path.isfile(path) or re.search(r"RelNotes|perl(cn|ko|jp|tw)\.|/tags|man1/perl|3perl", path):
                continue
            text = read_document(path)
            key = hashlib.sha256(re.sub(r"\W+", "", text).encode()).hexdigest()
            ascii_share = sum(c < "\x80" for c in text[:20000]) / max(1, len(text[:20000]))
            if key in seen or len(text) < 800 or ascii_share < 0.97:
                continue
            seen.add(key)
            documents.append({"package": package, "name": os.path.relpath(path, root), "key": key, "text": text})
            size += len(text)
        print(f"{package}: {size / 1e6:.1f} MB, {licence}")
    documents.sort(key=lambda d: d["key"])  # a random order that does not depend on the machine
    everything = "\n".join(d["text"] for d in documents)

    def clean(d):  # no piece of it stands in any other document
        return all(everything.count(d["text"][i:i + 150]) == 1 for i in range(0, len(d["text"]) - 150, 700))

    prose, hay, train = [], [], []
    for d in documents:
        letters = sum(c.isalpha() or c == " " for c in d["text"]) / len(d["text"])
        free = d["package"] in HELD_OUT and letters > 0.8 and "release-" not in d["name"]
        if free and 3000 < len(d["text"]) < 16000 and sum(len(x["text"]) for x in prose) < 100_000 and clean(d):
            prose.append(d)
        elif free and 6000 < len(d["text"]) < 60000 and sum(len(x["text"]) for x in hay) < 500_000 and clean(d):
            hay.append(d)
        else:
            train.append(d)
    for name, part in (("prose", prose), ("haystack", hay)):
        open(f"{WORK}/{name}.txt", "w").write("\n".join(d["text"] for d in part))
        print(name, len(part), "documents:", " ".join(d["name"] for d in part))
    with open(WORK + "/corpus.jsonl", "w") as f:
        for d in train:
            f.write(json.dumps(d) + "\n")
    print(f"{len(train)} training documents, {sum(len(d['text']) for d in train) / 1e6:.1f} MB")


def documents():
    return [json.loads(line) for line in open(WORK + "/corpus.jsonl")]


def vocab():
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    import tasks
    rng = random.Random(1)
    texts = [d["text"] for d in documents()]
    rng.shuffle(texts)
    texts = texts[:len(texts) // 2] + [tasks.plain_sample(rng) for _ in range(6000)]
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=RANKS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    # ByteLevel's printable stand-ins back to bytes.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in = {chr(b): b for b in printable}
    stand_in.update({chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in set(printable))})
    ids = sorted(bpe.get_vocab().items(), key=lambda x: x[1])
    learnt = [bytes(stand_in[c] for c in token) for token, _ in ids]
    ranks = [bytes([b]) for b in range(256)]
    ranks += [str(n).zfill(w).encode() for w in (2, 3) for n in range(10**w)] + [w.encode() for w in CHAT]
    ranks = list(dict.fromkeys(ranks))
    known = set(ranks)
    ranks += [t for t in learnt if t not in known and not re.fullmatch(rb"\d+", t)]
    ranks = ranks[:RANKS]
    os.makedirs(WORK + "/vocab", exist_ok=True)
    with open(WORK + "/vocab/tiktoken.model", "w") as f:
        for i, token in enumerate(ranks):
            f.write(base64.b64encode(token).decode() + f" {i}\n")
    entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {"added_tokens_decoder": {str(RANKS + i): {"content": n, **entry, "special": n not in PLAIN}
                                       for i, n in NAMES.items()},
              "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
              "tokenizer_class": "TikTokenTokenizer", "clean_up_tokenization_spaces": False}
    json.dump(config, open(WORK + "/vocab/tokenizer_config.json", "w"), indent=1)


_encoding = None


def encoding():
    global _encoding
    if _encoding is None:
        import tiktoken
        ranks = {}
        for line in open(WORK + "/vocab/tiktoken.model"):
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        _encoding = tiktoken.Encoding("weft-small", pat_str=SPLIT, mergeable_ranks=ranks,
                                      special_tokens={n: RANKS + i for i, n in NAMES.items()})
    return _encoding


def encode(text):
    return encoding().encode_ordinary(text)


def special(name):
    return RANKS + next(i for i, n in NAMES.items() if n == name)


def encode_corpus():
    out, rng, size = [], random.Random(2), 0
    docs = documents()
    rng.shuffle(docs)
    for d in docs:
        out.append(np.array(encode(d["text"]) + [special("[EOS]")], np.uint16))
        size += len(d["text"].encode())
    tokens = np.concatenate(out)
    tokens.tofile(WORK + "/train.u16")
    print(f"{len(tokens) / 1e6:.1f} M tokens, {size / len(tokens):.2f} bytes each")


if __name__ == "__main__":
    {"corpus": corpus, "vocab": vocab, "encode": encode_corpus}[sys.argv[1]]()
