#!/usr/bin/env bash
# sources.sh ROOT: what can be said of the sources line by line.
set -euo pipefail
cd "$1"
faults=0
# complain RULE: every line of the input is a fault.
complain() {
  local line
  while IFS= read -r line; do
    echo "$line: $1"
    faults=$((faults + 1))
  done
}
without_comments() { awk '{sub(/\/\/.*/, "")} /[^ \t]/ {print FILENAME ":" FNR ": " $0}' "$@"; }
where() { cut -d: -f1,2; }

mapfile -t files < <(find src -type f | sort)
((${#files[@]})) || { echo "no sources found: is this the right folder?"; exit 1; }
complain "longer than 600 lines" < <(awk 'FNR == 601 {print FILENAME}' "${files[@]}")
complain "finish it or file an issue" < <(grep -rInE --exclude-dir=golden '\b(TO''DO|FIX''ME|X''XX)\b' src tests cmake | where)

# Kernels are written once for all ISAs, and an ISA's header knows no kernel. Comments may name either.
complain "a kernel names an ISA" < <(without_comments src/kernels/*.inl |
  grep -E '\b_(mm|tile)|__m(128|256|512|mask)|__(AVX|AMX|SSE)|[aA][vV][xX]|[aA][mM][xX]|\btile_[a-z]|\basm\b' | where)
complain "an ISA names a kernel" < <(without_comments src/tile/isa/*.h |
  grep -E 'kernels/|[A-Za-z]Args\b|KernelTable|\b(kda|gemm|moe|attention|latent|expert|indexer|rope)' | where)

echo "${#files[@]} files, $faults faults"
((faults == 0))
