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
# The trunk reads densely; stages are entered on scores (batches.py). Then the learning rate falls to zero.
[ -f "$work/trunk.done" ] || { run train.py trunk --sources 0.2 --minutes "${TRUNK_MINUTES:-600}"; touch "$work/trunk.done"; }
[ -f "$work/cooled.done" ] || { run train.py cooled --start "$work/trunk.pt" --sources 0.1 --minutes "${COOL_MINUTES:-120}" \
  --decay "${COOL_MINUTES:-120}"; touch "$work/cooled.done"; }
[ -f "$work/model.pt" ] || run indexer.py "$work/cooled.pt" "$work/model.pt" --steps 200
[ -f "$work/mtp.pt" ] || run draft.py train mtp "$work/model.pt" "$work/mtp.pt" --steps 400
[ -f "$work/dspark.pt" ] || run draft.py train dspark "$work/model.pt" "$work/dspark.pt" --steps 600
run draft.py score "$work/model.pt" "$work/mtp.pt" "$work/dspark.pt"
run export.py "$work/model.pt" "$top/models/weft-small" --mtp "$work/mtp.pt" \
  --dspark "$work/dspark.pt" "$top/models/weft-small-dspark"
run make_golden.py "$top/models/weft-small" "$top/tests/golden/weft-small"
run evaluate.py "$work/model.pt"
