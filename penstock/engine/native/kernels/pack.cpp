// Weights from row-major [n, k] into panels of 32 outputs, in the order in which kernels read them:
//   bf16  [k / 32][2 halves][16 pairs of k][16 columns][2]
//   float [k][32 columns]
//   int8  [k / 64][2 halves][16 quads of k][16 columns][4]
//   int4  see int4.h
// With a second matrix (gate and up) a panel's first half holds 16 columns of the first, its second half the same
// columns of the second. Missing columns and inputs are zeros.
#include "penstock_native.h"
#include "pool.h"
#include "table.h"

#include <string.h>

namespace {

using Transpose = void (*)(uint32_t *out, const uint32_t *const rows[16]);

// Panels of 32-bit words, of two bf16 or four int8 inputs: [steps][2 halves][16 words of k][16 columns].
void pack_words(const char *first, const char *second, int64_t panel, int64_t n, int64_t row_bytes, int64_t steps,
                Transpose transpose, uint32_t *out) {
  for (int64_t step = 0; step < steps; step++)
    for (int half = 0; half < 2; half++, out += 256) {
      const uint32_t *rows[16];
      alignas(64) uint32_t edge[16][16];  // the last words of rows that end inside of a step
      for (int64_t c = 0; c < 16; c++) {
        const char *source = second && half ? second : first;
        int64_t column = second ? panel * 16 + c : panel * 32 + half * 16 + c,
                left = column < n ? row_bytes - step * 64 : 0;
        rows[c] = left > 0 ? (const uint32_t *)(source + column * row_bytes + step * 64) : nullptr;
        if (left <= 0 || left >= 64) continue;
        memset(edge[c], 0, 64);
        memcpy(edge[c], rows[c], (size_t)left);
        rows[c] = edge[c];
      }
      transpose(out, rows);
    }
}

// Values 0 to 15, one to a byte; what is missing is 8, which stands for 0.
void pack_nibbles(const uint8_t *first, const uint8_t *second, int64_t panel, int64_t n, int64_t k, int64_t k_padded,
                  uint8_t *out) {
  for (int64_t k0 = 0; k0 < k_padded; k0 += 32)
    for (int half = 0; half < 2; half++)
      for (int64_t quarter = 0; quarter < 4; quarter++)
        for (int64_t c = 0; c < 16; c++)
          for (int64_t byte = 0; byte < 4; byte++) {
            const uint8_t *source = second && half ? second : first;
            int64_t column = second ? panel * 16 + c : panel * 32 + half * 16 + c;
            auto at = [&](int64_t pair) {
              int64_t in = k0 + quarter * 8 + pair * 2 + byte / 2;  // A word's low half has the even inputs.
              return (uint8_t)(column < n && in < k ? source[column * k + in] & 15 : 8);
            };
            *out++ = (uint8_t)(at(byte % 2 * 2) | at(byte % 2 * 2 + 1) << 4);
          }
}

void pack_floats(const float *first, const float *second, int64_t panel, int64_t n, int64_t k, int64_t k_padded,
                 float *out) {
  for (int64_t in = 0; in < k_padded; in++)
    for (int64_t c = 0; c < 32; c++) {
      const float *source = second && c >= 16 ? second : first;
      int64_t column = second ? panel * 16 + c % 16 : panel * 32 + c;
      *out++ = column < n && in < k ? source[column * k + in] : 0.0f;
    }
}

// Has the system clear memory, a huge page at a time: two threads that write into one that is not there yet would both
// clear one, and one of the two is thrown away.
void touch(char *out, int64_t bytes) {
  constexpr int64_t kHuge = 2 << 20;
  int64_t before = (int64_t)((uintptr_t)out % kHuge), pages = (before + bytes + kHuge - 1) / kHuge;
  auto write = [=](int64_t page, int) {
    __atomic_fetch_or(out + (page ? page * kHuge - before : 0), 0, __ATOMIC_RELAXED);
  };
  penstock::parallel(pages, write);
}

void pack(const PsPack &job) {
  Transpose transpose = penstock::table->transpose;
  int64_t width = job.second ? 16 : 32, panels = (job.n + width - 1) / width;
  int64_t panel_values = 32 * job.k_padded;
  int64_t panel_bytes = job.type == PS_F32    ? panel_values * 4
                        : job.type == PS_BF16 ? panel_values * 2
                        : job.type == PS_I8   ? panel_values
                                              : panel_values / 2;
  const char *first = (const char *)job.first, *second = (const char *)job.second;
  int64_t n = job.n, k = job.k, k_padded = job.k_padded;
  auto one = [=](int64_t p, int) {
    char *out = (char *)job.out + p * panel_bytes;
    if (job.type == PS_BF16)
      pack_words(first, second, p, n, k * 2, k_padded / 32, transpose, (uint32_t *)out);
    else if (job.type == PS_I8)
      pack_words(first, second, p, n, k, k_padded / 64, transpose, (uint32_t *)out);
    else if (job.type == PS_I4)
      pack_nibbles((const uint8_t *)first, (const uint8_t *)second, p, n, k, k_padded, (uint8_t *)out);
    else
      pack_floats((const float *)first, (const float *)second, p, n, k, k_padded, (float *)out);
  };
  touch((char *)job.out, panels * panel_bytes);
  penstock::parallel(panels, one);
}

}  // namespace

PS_EXPORT void ps_pack(const PsPack *jobs, int64_t count) {
  penstock::PoolLock held;
  for (int64_t i = 0; i < count; i++) pack(jobs[i]);
}
