#!/usr/bin/env bash
# One line on the processor that tests run on: what it is, and the instruction sets by which libraries choose their kernels.
set -euo pipefail
field() { awk -F ': *' -v name="$1" '$1 ~ "^" name "[ \t]*$" { print $2; exit }' /proc/cpuinfo 2>/dev/null || true; }
flags=" $(field flags) "
sets=""
for set in avx avx2 fma avx_vnni avx512f avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8; do
    case $flags in *" $set "*) sets+=" $set" ;; esac
done
model=$(field 'model name')
printf 'processor: %s (%s), %s cores, with%s\n' "${model:-unknown}" "$(uname -m)" "$(getconf _NPROCESSORS_ONLN)" "${sets:- none of AVX}"
