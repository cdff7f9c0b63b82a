#!/usr/bin/env bash
# rules_can_fail.sh ROOT COMPILER: each rule of the structure tests, broken once, is noticed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$1 compiler=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wrong=0

# refused WHAT COMMAND...: the command must fail, and say what is expected to be said.
refused() {
  local what=$1 output
  shift
  if output=$("$@" 2>&1); then
    echo "not noticed: $what"
    wrong=1
  elif ! grep -q "$what" <<<"$output"; then
    printf 'other words than "%s":\n%s\n' "$what" "$output"
    wrong=1
  fi
}
# broken SCRIPT WHAT FILE LINE: the tree with one line more.
broken() {
  rm -rf "$work/tree"
  mkdir "$work/tree"
  cp -r "$root/src" "$root/cmake" "$work/tree/"
  mkdir "$work/tree/tests"
  printf '%s\n' "$4" >>"$work/tree/$3"
  refused "$2" "$here/$1" "$work/tree"
}
broken layers.sh "cache must not include model" src/cache/paged_cache.h '#include "model/model.h"'
broken layers.sh "kernels must not include graph" src/kernels/gemm.inl '# include "graph/graph.h"'
broken layers.sh "no such layer" src/base/check.h '#include "util/check.h"'
broken layers.sh "say the layer" src/base/cpu.cc '#include "check.h"'
broken sources.sh "gemm.inl:[0-9]*: a kernel names an ISA" src/kernels/gemm.inl '__m512 x;'
broken sources.sh "kda.inl:[0-9]*: a kernel names an ISA" src/kernels/kda.inl '#ifdef __AVX2__'
broken sources.sh "avx2.h:[0-9]*: an ISA names a kernel" src/tile/isa/avx2.h 'static void kda_step();'
broken sources.sh "finish it" src/base/check.h "// TO""DO: later"
broken sources.sh "longer than 600" src/base/check.h "$(yes '//' | head -600)"

object() {  # object FLAGS <source
  # shellcheck disable=SC2086
  "$compiler" -x c++ -std=c++20 -O2 $1 -c -o "$work/unit.o" -
}
object "" <<<'extern const int kernel_table_portable; const int kernel_table_portable = 1; int leak() { return 2; }'
refused leak "$here/isa_object.sh" portable "$work/unit.o"
object -O0 <<<'inline int f() { return 2; } extern int (*const kernel_table_portable)(); int (*const kernel_table_portable)() = f;'
refused "_Z1fv" "$here/isa_object.sh" portable "$work/unit.o"
wide='typedef float V __attribute__((vector_size(32))); static void add(V* x) { *x += *x; }
      extern void (*const kernel_table_portable)(V*); void (*const kernel_table_portable)(V*) = add;'
object -mavx <<<"$wide"
refused "AVX instructions" "$here/isa_object.sh" portable "$work/unit.o"
object "-mavx512f -mavx512vl -mprefer-vector-width=512" <<<"typedef float W __attribute__((vector_size(64))); static void add(W* x) { *x += *x; }
      extern void (*const kernel_table_avx2)(W*); void (*const kernel_table_avx2)(W*) = add;"
refused "no 256-bit" "$here/isa_object.sh" avx2 "$work/unit.o"
object "" <<<"${wide//portable/avx2}"
refused "no 256-bit" "$here/isa_object.sh" avx2 "$work/unit.o"
{
  for i in $(seq 120); do echo "int f$i() { return $i; }"; done
  echo 'typedef float V __attribute__((vector_size(32))); void wide_one(V* x) { *x += *x; }'
} | object -mavx
refused wide_one "$here/baseline_code.sh" "$work/unit.o"
exit $wrong
