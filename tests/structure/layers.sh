#!/usr/bin/env bash
# layers.sh ROOT: a folder of src includes itself and the folders before it in this list, nothing else of ours.
set -euo pipefail
cd "$1/src"
find . -type f \( -name '*.h' -o -name '*.cc' -o -name '*.inl' -o -name '*.in' \) -printf '%P\n' | sort | xargs awk '
  BEGIN {
    count = split("base comm tile kernels graph cache model text engine app", order, " ")
    for (i = 1; i <= count; ++i) rank[order[i]] = i
  }
  FNR == 1 {
    own = FILENAME
    sub(/\/.*/, "", own)
    if (!(own in rank)) { print "src/" FILENAME ": a folder that is no layer"; ++faults; }
  }
  match($0, /^[ \t]*#[ \t]*include[ \t]*"[^"]+"/) {
    name = $0
    sub(/^[^"]*"/, "", name)
    sub(/".*/, "", name)
    layer = name
    if (name !~ /\//) {
      if (name !~ /\.inc$/) { print "src/" FILENAME ":" FNR ": \"" name "\": say the layer, as in \"base/check.h\""; ++faults }
      next
    }
    sub(/\/.*/, "", layer)
    if (!(layer in rank)) { print "src/" FILENAME ":" FNR ": \"" name "\": no such layer"; ++faults }
    else if (rank[layer] > rank[own]) { print "src/" FILENAME ":" FNR ": " own " must not include " layer; ++faults }
    ++seen
  }
  END {
    if (!seen) { print "no includes found: is this the right folder?"; exit 1 }
    print seen " includes, " faults + 0 " faults"
    exit faults > 0
  }'
