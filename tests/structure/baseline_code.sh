#!/usr/bin/env bash
# baseline_code.sh LIBRARY...: everything outside the ISA units runs before or without dispatch, so it must run on any
# x86-64. (tzcnt is what old machines read as bsf; compilers use it where both give the same.)
set -euo pipefail
(($#)) || { echo "no libraries given"; exit 1; }
objdump -d -C --no-show-raw-insn "$@" | awk '
  /^[0-9a-f]+ <.*>:$/ { in_function = $0; sub(/^[0-9a-f]+ /, "", in_function); ++functions; next }
  /%[yz]mm|%tmm|%k[0-7]|^ *[0-9a-f]+:\tv[a-z0-9]+ .*%xmm|:\t(andn|bextr|bls[a-z]+|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|popcnt|movbe) / {
    if (in_function != last) print in_function $0
    last = in_function
    ++faults
  }
  END {
    if (functions < 100) { print "only " functions + 0 " functions: not our libraries"; exit 1 }
    print functions " functions, " faults + 0 " instructions beyond baseline x86-64"
    exit faults > 0
  }'
