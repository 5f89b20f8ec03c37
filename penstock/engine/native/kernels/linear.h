// y = x W^T on plain vectors. Each output is one chain of multiply-adds in the order of k, whatever m is, so a
// row's bits never depend on the rows beside it.
//
// A panel of packed bf16 weights is [k / 32][2 halves][16 pairs of k][16 columns][2]; of float weights
// [k][32 columns]; of int8 [k / 64][2 halves][16 quads of k][16 columns][4]; of int4
// see int4.h.
#pragma once
#include "epilogue.h"
#include "int4.h"

namespace {

// Rows that share what is loaded of a weight, and the halves of a panel (16 columns each) whose sums are held in registers
// at once: a few rows take both, in the order of memory, many take one after the other.
#ifdef __AVX512F__
constexpr int kRowBlock = 8, kNibbleRows = 8;
constexpr int halves_at_once(int) { return 2; }
#else
constexpr int kRowBlock = 4, kNibbleRows = 2;  // Rows of nibbles hold more: four were slower.
constexpr int halves_at_once(int rows) { return rows > 2 ? 1 : 2; }
#endif
constexpr int64_t kAheadRows = 8;

// Rows of bf16 as the products want them: in pairs, or where the processor has no instruction for those, as floats.
#ifdef __AVX512BF16__
using Wide = bf16;
constexpr bool kWideInputs = false, kInRegisters = true;
static inline PairInput spread(const bf16 *x) { return spread_pair(x); }
#else
using Wide = float;
constexpr bool kWideInputs = true, kInRegisters = false;
static inline PairInput spread(const float *x) { return {set1(x[0]), set1(x[1])}; }
#endif

// What the piece says is read soon, fetched a little at each step of k.
class Wanted {
 public:
  Wanted(const LinearPiece *piece, int64_t steps) : next_(piece->ahead), end_(piece->ahead + piece->num_ahead) {
    int64_t lines = 0;
    for (const LinearAhead *each = next_; each < end_; each++) lines += each->lines;
    per_step_ = steps ? (lines + steps - 1) / steps : 0;
  }
  inline void step() {
    for (int64_t i = 0; i < per_step_; i++, left_--, at_ += 64) {
      while (!left_) {
        if (next_ == end_) {
          per_step_ = 0;
          return;
        }
        at_ = next_->at, left_ = next_->lines, next_++;
      }
      _mm_prefetch(at_, _MM_HINT_T1);
    }
  }

 private:
  const LinearAhead *next_, *end_;
  const char *at_ = nullptr;
  int64_t left_ = 0, per_step_;
};

// R rows by H halves of one panel of bf16 weights, k in [k_first, k_last). Not inlined: the addresses of its caller would
// push those of the rows out of their registers, inside of the innermost loop.
template <int R, int H>
static __attribute__((noinline)) void bf16_halves(const bf16 *w, const Wide *a, int64_t lda, int64_t k_first,
                                                  int64_t k_last, float *sums, bool fresh, Wanted *wanted,
                                                  const AddedRows *added) {
  F16 acc[R][H];
  for (int r = 0; r < R; r++)
    for (int h = 0; h < H; h++) acc[r][h] = fresh ? zero() : load(sums + r * 32 + h * 16);
  for (int64_t k = k_first; k < k_last; k += 32) {
    wanted->step();
    const bf16 *block = w + k * 32;
    for (int p = 0; p < 16; p++) {
      Pairs part[H];
      for (int h = 0; h < H; h++) {
        fetch_ahead(block + h * 512 + p * 32);
        part[h] = load_pairs(block + h * 512 + p * 32);
      }
      for (int r = 0; r < R; r++) {
        PairInput x = spread(a + r * lda + k + 2 * p);
        for (int h = 0; h < H; h++) acc[r][h] = dot(acc[r][h], part[h], x);
      }
    }
  }
  if constexpr (kInRegisters && H == 2)
    if (added) add_in_place<bf16>(added, acc);
  for (int r = 0; r < R; r++)
    for (int h = 0; h < H; h++) store(sums + r * 32 + h * 16, acc[r][h]);
}

template <int R>
static void bf16_rows(const bf16 *w, const Wide *a, int64_t lda, int64_t k_first, int64_t k_last, float *sums,
                      bool fresh, Wanted *wanted, const AddedRows *added) {
  constexpr int H = halves_at_once(R);
  for (int h = 0; h < 2; h += H)
    bf16_halves<R, H>(w + h * 512, a, lda, k_first, k_last, sums + h * 16, fresh, wanted, added);
}

template <int R, int H>
static inline void f32_halves(const float *w, const float *a, int64_t lda, int64_t k_first, int64_t k_last, float *sums,
                              bool fresh) {
  F16 acc[R][H];
  for (int r = 0; r < R; r++)
    for (int h = 0; h < H; h++) acc[r][h] = fresh ? zero() : load(sums + r * 32 + h * 16);
  for (int64_t k = k_first; k < k_last; k++) {
    F16 part[H];
    for (int h = 0; h < H; h++) {
      fetch_ahead(w + k * 32 + h * 16);
      part[h] = load(w + k * 32 + h * 16);
    }
    for (int r = 0; r < R; r++) {
      F16 x = set1(a[r * lda + k]);
      for (int h = 0; h < H; h++) acc[r][h] = fma(x, part[h], acc[r][h]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int h = 0; h < H; h++) store(sums + r * 32 + h * 16, acc[r][h]);
}

template <int R>
static void f32_rows(const float *w, const float *a, int64_t lda, int64_t k_first, int64_t k_last, float *sums,
                     bool fresh) {
  constexpr int H = halves_at_once(R);
  for (int h = 0; h < 2; h += H) f32_halves<R, H>(w + h * 16, a, lda, k_first, k_last, sums + h * 16, fresh);
}

#ifdef __AVX512VNNI__
constexpr uint8_t kByteShift = 0x80;
// The instruction wants unsigned x: inputs are packed as x + 128, and 128 times the column's sum comes out again. Exact.
template <int R>
static void i8_rows(const LinearPiece *piece, int64_t panel, int64_t row, const int8_t *a, int64_t lda) {
  const PsWeight *w = piece->job->weight;
  const int8_t *block = (const int8_t *)w->data + panel * w->k_padded * 32;
  __m512i acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
  for (int64_t k = 0; k < w->k_padded; k += 64, block += 2048)
    for (int q = 0; q < 16; q++) {
      fetch_ahead(block + q * 64);
      fetch_ahead(block + 1024 + q * 64);
      __m512i w0 = _mm512_loadu_si512(block + q * 64), w1 = _mm512_loadu_si512(block + 1024 + q * 64);
      for (int r = 0; r < R; r++) {
        int32_t x;
        memcpy(&x, a + r * lda + k + 4 * q, 4);
        __m512i shifted = _mm512_set1_epi32(x);
        acc[r][0] = dot_bytes(acc[r][0], shifted, w0);
        acc[r][1] = dot_bytes(acc[r][1], shifted, w1);
      }
    }
  alignas(64) int32_t sums[R * 32];
  for (int r = 0; r < R; r++)
    for (int h = 0; h < 2; h++) {
      __m512i excess = _mm512_slli_epi32(_mm512_loadu_si512(w->sums + panel * 32 + h * 16), 7);
      _mm512_storeu_si512(sums + r * 32 + h * 16, _mm512_sub_epi32(acc[r][h], excess));
    }
  finish_block(piece, panel, row, R, sums);
}
#else
constexpr uint8_t kByteShift = 0;
// The instruction wants one operand unsigned: the weight's magnitude, times the input with the weight's sign. Two products
// are at most 2 * 128 * 127 (a checkpoint's weights may be -128, inputs are not), which sixteen bits hold. Exact.
template <int R, int H>
static inline void i8_halves(const int8_t *w, int64_t k_padded, const int8_t *a, int64_t lda, int32_t *sums) {
  __m256i acc[R][2 * H], ones = _mm256_set1_epi16(1);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 2 * H; c++) acc[r][c] = _mm256_setzero_si256();
  for (int64_t k = 0; k < k_padded; k += 64, w += 2048)
    for (int q = 0; q < 16; q++) {
      __m256i part[2 * H], size[2 * H];
      for (int c = 0; c < 2 * H; c++) {
        const int8_t *at = w + c / 2 * 1024 + q * 64 + c % 2 * 32;
        if (c % 2 == 0) fetch_ahead(at);
        part[c] = _mm256_loadu_si256((const __m256i *)at);
        size[c] = _mm256_abs_epi8(part[c]);
      }
      for (int r = 0; r < R; r++) {
        int32_t four;
        memcpy(&four, a + r * lda + k + 4 * q, 4);
        __m256i x = _mm256_set1_epi32(four);
        for (int c = 0; c < 2 * H; c++) {
          __m256i pairs = _mm256_maddubs_epi16(size[c], _mm256_sign_epi8(x, part[c]));
          acc[r][c] = _mm256_add_epi32(acc[r][c], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 2 * H; c++) _mm256_storeu_si256((__m256i *)(sums + r * 32 + c * 8), acc[r][c]);
}

template <int R>
static void i8_rows(const LinearPiece *piece, int64_t panel, int64_t row, const int8_t *a, int64_t lda) {
  const PsWeight *w = piece->job->weight;
  const int8_t *data = (const int8_t *)w->data + panel * w->k_padded * 32;
  constexpr int H = R > 1 ? 1 : 2;
  alignas(64) int32_t sums[R * 32];
  for (int h = 0; h < 2; h += H) i8_halves<R, H>(data + h * 1024, w->k_padded, a, lda, sums + h * 16);
  finish_block(piece, panel, row, R, sums);
}
#endif

template <int R>
static void rows_at(const LinearPiece *piece, int64_t panel, int64_t row, Wanted *wanted) {
  const PsWeight *w = piece->job->weight;
  alignas(64) float here[R * 32];
  float *sums = piece->partial ? piece->partial + ((panel - piece->partial_panel) * piece->m_padded + row) * 32 : here;
  bool fresh = piece->k_first == 0;
  int64_t lda = piece->lda;
  AddedRows rows;
  bool ends = piece->k_last == w->k_padded, added = false;
  if (w->type == PS_BF16) {
    added = kInRegisters && ends && find_added(piece, panel, row, R, &rows);
    bf16_rows<R>((const bf16 *)w->data + panel * w->k_padded * 32, (const Wide *)piece->a + row * lda, lda,
                 piece->k_first, piece->k_last, sums, fresh, wanted, added ? &rows : nullptr);
  } else if (w->type == PS_F32)
    f32_rows<R>((const float *)w->data + panel * w->k_padded * 32, (const float *)piece->a + row * lda, lda,
                piece->k_first, piece->k_last, sums, fresh);
  else if (w->type == PS_I8)
    return i8_rows<R>(piece, panel, row, (const int8_t *)piece->a + row * lda, lda);
  if (ends) added ? finish_sums(piece, panel, row, R, sums) : finish_block(piece, panel, row, R, sums);
}

// 64 values from x + i (zeros past k) as int8.
template <class T>
static inline void quantize_64(const T *x, int64_t i, int64_t k, float scale, int8_t *out) {
  F16 inverse = set1(scale > 0 ? 1.0f / scale : 0.0f);
  for (int64_t j = i; j < i + 64; j += 16, out += 16) store_i8(out, j < k ? load_tail(x + j, k - j) * inverse : zero());
}

// Row r of x as int8, its 64-byte steps `step` bytes apart in `out`.
static void quantize_row(const PsLinear *job, int64_t r, int8_t *out, int64_t step, float *scale) {
  int64_t k = job->weight->k, padded = job->weight->k_padded;
  const bf16 *narrow = (const bf16 *)job->x + r * job->ldx;
  const float *wide = (const float *)job->x + r * job->ldx;
  bool is_narrow = job->x_type == PS_BF16;
  *scale = is_narrow ? row_scale(narrow, k) : row_scale(wide, k);
  for (int64_t i = 0; i < padded; i += 64, out += step) {
    if (is_narrow)
      quantize_64(narrow, i, k, *scale, out);
    else
      quantize_64(wide, i, k, *scale, out);
  }
}

// Rows [first, last) of x as the kernels read them: row-major, k padded with zeros, quantized for int8 and int4 weights.
static void pack_rows_plain(const PsLinear *job, int64_t first, int64_t last, void *a, float *a_scale) {
  const PsWeight *w = job->weight;
  int64_t k = w->k, padded = w->k_padded;
  for (int64_t r = first; r < last && r < job->m; r++) {
    const char *x = (const char *)job->x + r * job->ldx * (job->x_type == PS_BF16 ? 2 : 4);
    if (w->type == PS_I4) {
      quantize_groups(job, r, (int8_t *)a + r * padded, (GroupInput *)a_scale + r * (padded / w->group));
    } else if (w->type == PS_I8) {
      int8_t *out = (int8_t *)a + r * padded;
      quantize_row(job, r, out, 64, a_scale + r);
      if (kByteShift)
        for (int64_t i = 0; i < padded; i++) out[i] = (int8_t)(out[i] ^ kByteShift);
    } else if (w->type == PS_BF16 && kWideInputs) {
      float *out = (float *)a + r * padded;
      for (int64_t i = 0; i < padded; i += 16) store(out + i, i < k ? load_tail((const bf16 *)x + i, k - i) : zero());
    } else {
      int64_t size = w->type == PS_BF16 ? 2 : 4;
      char *out = (char *)a + r * padded * size;
      memcpy(out, x, (size_t)(k * size));
      memset(out + k * size, 0, (size_t)((padded - k) * size));
    }
  }
}

// rows_at with as many rows as are left, R at most.
template <int R>
static inline void rows_left(const LinearPiece *piece, int64_t panel, int64_t row, int64_t rows, Wanted *wanted) {
  if (rows >= R) return rows_at<R>(piece, panel, row, wanted);
  if constexpr (R > 1) rows_left<R - 1>(piece, panel, row, rows, wanted);
}

template <int R>
static inline void nibble_rows_left(const LinearPiece *piece, const uint8_t *nibbles, int64_t g, int64_t row,
                                    int64_t rows, int32_t *sums) {
  const PsWeight *w = piece->job->weight;
  if (rows >= R)
    nibble_rows<R>(nibbles, w->group, (const int8_t *)piece->a + row * piece->lda + g * w->group, piece->lda,
                   group_inputs(piece, row, g), w->k_padded / w->group, sums);
  else if constexpr (R > 1)
    nibble_rows_left<R - 1>(piece, nibbles, g, row, rows, sums);
}

// Blocks of `most` rows that differ by one row at most: a short last one would read the weights for little.
static inline int64_t even_block(int64_t rows, int64_t most) {
  int64_t blocks = (rows + most - 1) / most;
  return (rows + blocks - 1) / blocks;
}

static void vector_int4(const LinearPiece *piece, int64_t panel) {
  int4_panel(
      piece, panel, [](const uint8_t *) {},
      [piece](const uint8_t *nibbles, int64_t g, int64_t row, int64_t rows, int32_t *sums) {
        int64_t block = even_block(rows, kNibbleRows);
        for (int64_t r = 0; r < rows; r += block)
          nibble_rows_left<kNibbleRows>(piece, nibbles, g, row + r, rows - r < block ? rows - r : block, sums + r * 32);
      });
}

static void vector_linear(const LinearPiece *piece, int64_t panel_first, int64_t panel_last) {
  int64_t m = piece->job->m, block = even_block(m, kRowBlock), steps = (piece->k_last - piece->k_first) / 32;
  // With few rows the weights themselves come no faster than they are computed with.
  Wanted wanted(piece, m < kAheadRows ? 0 : (panel_last - panel_first) * ((m + block - 1) / block) * steps);
  for (int64_t panel = panel_first; panel < panel_last; panel++) {
    if (piece->job->weight->type == PS_I4) {
      vector_int4(piece, panel);
      continue;
    }
    for (int64_t row = 0; row < m; row += block)
      rows_left<kRowBlock>(piece, panel, row, m - row < block ? m - row : block, &wanted);
  }
}

}  // namespace
