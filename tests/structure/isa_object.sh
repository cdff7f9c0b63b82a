#!/usr/bin/env bash
# isa_object.sh NAME OBJECT: the unit of an instruction set exports its kernel table and nothing else, and consists of
# the instructions it is named for. A weak symbol would be worse than a strong one: the linker keeps one copy of an
# inline function, and if it is this one, the whole program runs it, on machines that cannot.
set -euo pipefail
name=$1 object=$2
exported=$(nm --extern-only --defined-only "$object" | awk '{print $NF}')
if [[ $exported != *kernel_table_"$name"* || $(wc -l <<<"$exported") -ne 1 ]]; then
  echo "exported symbols, one kernel_table_$name wanted:"
  echo "$exported"
  exit 1
fi
weak=$(nm "$object" | awk '$(NF - 1) ~ /^[WwVvu]$/ {print $NF}')
if [[ -n $weak ]]; then
  echo "weak symbols:"
  echo "$weak"
  exit 1
fi

code=$(objdump -d --no-show-raw-insn "$object")
has() { grep -qE "$1" <<<"$code"; }
must() { has "$1" || { echo "no $2: not compiled for $name"; exit 1; }; }
must_not() { if has "$1"; then echo "has $2, which $name may lack"; exit 1; fi; }
case $name in
  portable) must_not '%[yz]mm|\sv[a-z0-9]+ .*%xmm' "AVX instructions"; must_not '%tmm' tiles ;;
  avx2) must '%ymm' "256-bit instruction"; must_not '%zmm|%k[0-7]' "AVX-512"; must_not '%tmm' tiles ;;
  avx512) must '\svdpbf16ps .*%zmm' "vdpbf16ps"; must_not '%tmm' tiles ;;
  amx) must '\stdpbf16ps ' tdpbf16ps ;;
  amxmodel) must '%zmm' "512-bit instruction"; must_not '%tmm' tiles ;;
  *) echo "no rule for the instructions of $name: add one to $0"; exit 1 ;;
esac
