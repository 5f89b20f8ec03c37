// AMX tiles in plain C++, so that tests of the tile kernels run on processors without them (built on request only, see
// docs/design/003). Slow, and right to the order of sums; the processor flushes subnormals, this does not.
#pragma once
#include <stdint.h>
#include <string.h>

namespace {

struct EmulatedTile {
  int rows, row_bytes;
  alignas(64) char data[16][64];
};
thread_local EmulatedTile emulated[8];

static inline void emulate_loadconfig(const void *config) {
  const uint8_t *at = (const uint8_t *)config;
  for (int i = 0; i < 8; i++) {
    memset(&emulated[i], 0, sizeof emulated[i]);
    emulated[i].row_bytes = at[16 + 2 * i] | at[17 + 2 * i] << 8;
    emulated[i].rows = at[48 + i];
  }
}
static inline void emulate_zero(int tile) { memset(emulated[tile].data, 0, sizeof emulated[tile].data); }
static inline void emulate_load(int tile, const void *from, int64_t stride) {
  emulate_zero(tile);
  for (int r = 0; r < emulated[tile].rows; r++)
    memcpy(emulated[tile].data[r], (const char *)from + r * stride, (size_t)emulated[tile].row_bytes);
}
static inline void emulate_store(int tile, void *to, int64_t stride) {
  for (int r = 0; r < emulated[tile].rows; r++)
    memcpy((char *)to + r * stride, emulated[tile].data[r], (size_t)emulated[tile].row_bytes);
}
template <class Sum, class Add>
static inline void emulate_product(int c, int a, int b, Add add) {
  for (int m = 0; m < emulated[c].rows; m++)
    for (int n = 0; n < emulated[c].row_bytes / 4; n++) {
      Sum sum;
      memcpy(&sum, emulated[c].data[m] + 4 * n, 4);
      for (int k = 0; k < emulated[a].row_bytes / 4; k++)
        sum = add(sum, emulated[a].data[m] + 4 * k, emulated[b].data[k] + 4 * n);
      memcpy(emulated[c].data[m] + 4 * n, &sum, 4);
    }
}
static inline float emulated_bf16(const char *at) {
  uint16_t half;
  memcpy(&half, at, 2);
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline void emulate_bf16(int c, int a, int b) {
  emulate_product<float>(c, a, b, [](float sum, const char *x, const char *w) {
    for (int i = 0; i < 4; i += 2) sum = __builtin_fmaf(emulated_bf16(x + i), emulated_bf16(w + i), sum);
    return sum;
  });
}
static inline void emulate_int8(int c, int a, int b) {
  emulate_product<int32_t>(c, a, b, [](int32_t sum, const char *x, const char *w) {
    for (int i = 0; i < 4; i++) sum += (int32_t)(int8_t)x[i] * (int8_t)w[i];
    return sum;
  });
}

}  // namespace

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig emulate_loadconfig
#define _tile_release() (void)0
#define _tile_loadd emulate_load
#define _tile_stream_loadd emulate_load
#define _tile_stored emulate_store
#define _tile_zero emulate_zero
#define _tile_dpbf16ps emulate_bf16
#define _tile_dpbssd emulate_int8
