// Which instruction sets this machine and its kernel really offer.
#include "cpu.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace penstock {
namespace {

constexpr int kRequestPermission = 0x1023, kTileData = 18;

bool amx_allowed() {
  // Linux gives tile state only to processes that ask; before 5.16 it cannot be asked for.
  return __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has(const KernelTable *table) {
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  bool vnni = avx512 && __builtin_cpu_supports("avx512vnni"), dots = vnni && __builtin_cpu_supports("avx512bf16");
#ifdef PENSTOCK_EMULATE_TILES
  if (table == &kAmx) return vnni;
#endif
  if (table == &kAmx) return dots && amx_allowed();
  if (table == &kAvx512Bf16) return dots;
  if (table == &kAvx512Vnni) return vnni;
  if (table == &kAvx512) return avx512;
  return avx2;
}

}  // namespace

const KernelTable *choose(const char *name) {
  __builtin_cpu_init();
  const KernelTable *tables[] = {&kAmx, &kAvx512Bf16, &kAvx512Vnni, &kAvx512, &kAvx2};
  for (const KernelTable *table : tables) {
    if (name && *name && strcmp(name, table->name)) continue;
    if (has(table)) return table;
  }
  return nullptr;
}

}  // namespace penstock
