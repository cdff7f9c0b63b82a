#!/bin/sh
# Rebuilds models/weft-small and models/weft-small-dspark: corpus, vocabulary, trunk, indexers, drafts, export, golden.
# WEFT_TRAIN_DIR holds everything in between (default /tmp/weft-train); steps whose output exists are skipped.
set -e
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
export WEFT_TRAIN_DIR="${WEFT_TRAIN_DIR:-/tmp/weft-train}"
# Tensors of a step come from a heap that is never given back, in large pages: no page faults in every step.
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 GLIBC_TUNABLES=glibc.malloc.hugetlb=1
work=$WEFT_TRAIN_DIR
mkdir -p "$work"
run() { echo "== $*"; python3 "$here/$@"; }

[ -f "$work/corpus.jsonl" ] || run data.py corpus
[ -f "$work/vocab/tiktoken.model" ] || run data.py vocab
[ -f "$work/train.u16" ] || run data.py encode
# The trunk reads densely. Stages are entered on scores (batches.py) up to 4,096 tokens, from there on rows have all
# lengths; from 1,024 tokens on it has indexers. Then the learning rate falls to zero.
how="--sources 0.3 --indexers 1024 --mix 4096 --longest 4096"
[ -f "$work/trunk.done" ] || { run train.py trunk $how --until "${TRUNK_TOKENS:-4200000}"; touch "$work/trunk.done"; }
[ -f "$work/cooled.done" ] || { run train.py cooled $how --start "$work/trunk.pt" --until "${ALL_TOKENS:-7400000}" \
  --decay "${COOL_TOKENS:-3200000}"; touch "$work/cooled.done"; }
[ -f "$work/drafts.pt" ] || run draft.py train "$work/cooled.pt" "$work/drafts.pt" --steps "${DRAFT_STEPS:-4000}"
run draft.py score "$work/cooled.pt" "$work/drafts.pt"
run export.py "$work/cooled.pt" "$top/models/weft-small" --drafts "$work/drafts.pt" "$top/models/weft-small-dspark"
run make_golden.py "$top/models/weft-small" "$top/tests/golden/weft-small"
run evaluate.py "$work/cooled.pt"
