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

// Up to two rows read a panel strictly in the order of memory where the sums of both its halves are held at once (of bf16 on
// AVX2 one row): they wait for nothing else, and the processor's prefetcher follows one stream rather than two that lie
// 1 KiB apart. AVX-512's bf16 and VNNI's int8 ask for what lies kNearBytes ahead then; int8 without VNNI asks for nothing.
constexpr int kRowsInOrder = 2;
// Rows that share what is loaded of a weight (kByteRows: of int8), and the halves of a panel (16 columns each) whose sums
// are held in registers at once. One half after the other goes in pieces of k that stay in the first cache: bf16 on AVX2,
// and more than two rows of int8 without VNNI. The sums of six rows of one half on AVX2 are twelve chains of
// multiply-adds: with fewer than eight some of them wait for each other.
constexpr int64_t kPieceInCache = 128;
#ifdef __AVX512BF16__
constexpr int kRowBlock = 12, kByteRows = 12, kNibbleRows = 8;
constexpr int halves_at_once(int) { return 2; }
#elif defined(__AVX512F__)
constexpr int kRowBlock = 8, kByteRows = 8, kNibbleRows = 8;
constexpr int halves_at_once(int) { return 2; }
#else
constexpr int kRowBlock = 6, kByteRows = 4, kNibbleRows = 5;  // Six rows of nibbles would be spilled.
constexpr int halves_at_once(int rows) { return rows <= kRowsInOrder ? 2 : 1; }
#endif
constexpr int64_t kAheadRows = 8;

// Rows of bf16 as the products want them: in pairs, or where the processor has no instruction for those, as floats.
#ifdef __AVX512BF16__
using Wide = bf16;
constexpr bool kWideInputs = false, kAddsHere = true;
static inline PairInput spread(const bf16 *x) { return spread_pair(x); }
#else
using Wide = float;
constexpr bool kWideInputs = true, kAddsHere = false;
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

// The products of `inner` and B^T, in the order in which `add_adapters` has them.
template <int R>
static inline void add_here(const AddedHere &added, F16 (&acc)[R][2]) {
  const bf16 *inner0 = added.inner[0], *inner1 = added.inner[1];
  bool is_shared = inner0 == inner1;
  for (int64_t j = 0; j < added.rank; j += 2) {
    Pairs b0 = load_pairs(added.b[0] + j * 16), b1 = load_pairs(added.b[1] + j * 16);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      PairInput x = spread_pair(inner0 + r * kAdapterRanks + j);
      acc[r][0] = dot(acc[r][0], b0, x);
      acc[r][1] = dot(acc[r][1], b1, is_shared ? x : spread_pair(inner1 + r * kAdapterRanks + j));
    }
  }
}

// R rows by one panel of bf16 weights, or half of one, k in [k_first, k_last). Not inlined: the addresses of its caller
// would push those of the rows out of their registers, inside of the innermost loop. Loops over the sums are written out:
// else GCC has them in memory before and behind the innermost loop, as many loads and stores as eight steps of it take.
#ifdef __AVX512F__
template <int R>
static __attribute__((noinline)) void bf16_rows(const bf16 *w, const Wide *a, int64_t lda, int64_t k_first,
                                                int64_t k_last, float *sums, bool fresh, Wanted *wanted,
                                                const AddedHere *added) {
  constexpr int H = 2;
  F16 acc[R][H];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int h = 0; h < H; h++) acc[r][h] = fresh ? zero() : load(sums + r * 32 + h * 16);
  for (int64_t k = k_first; k < k_last; k += 32) {
    wanted->step();
    const bf16 *block = w + k * 32;
    if constexpr (R <= kRowsInOrder) {
#pragma GCC unroll 2
      for (int h = 0; h < H; h++)
        for (int p = 0; p < 16; p++) {
          const bf16 *at = block + h * 512 + p * 32;
          fetch_near(at);
          Pairs part = load_pairs(at);
          for (int r = 0; r < R; r++) acc[r][h] = dot(acc[r][h], part, spread(a + r * lda + k + 2 * p));
        }
    } else {
      for (int p = 0; p < 16; p++) {
        Pairs part[H];
#pragma GCC unroll 2
        for (int h = 0; h < H; h++) {
          fetch_ahead(block + h * 512 + p * 32);
          part[h] = load_pairs(block + h * 512 + p * 32);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          PairInput x = spread(a + r * lda + k + 2 * p);
#pragma GCC unroll 2
          for (int h = 0; h < H; h++) acc[r][h] = dot(acc[r][h], part[h], x);
        }
      }
    }
  }
  if (kAddsHere && added) add_here<R>(*added, acc);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int h = 0; h < H; h++) store(sums + r * 32 + h * 16, acc[r][h]);
}
#else
// H is always 1: with the loops over it written out, GCC spills the sums of a half, and eight rows take 1.8 times as long.
template <int R, int H>
static __attribute__((noinline)) void bf16_halves(const bf16 *w, const float *a, int64_t lda, int64_t k_first,
                                                  int64_t k_last, float *sums, bool fresh, Wanted *wanted) {
  __m256 acc[H][R][2];
  const __m256i high = _mm256_set1_epi32((int)0xffff0000);
  for (int h = 0; h < H; h++)
    for (int r = 0; r < R; r++)
      for (int c = 0; c < 2; c++)
        acc[h][r][c] = fresh ? _mm256_setzero_ps() : _mm256_loadu_ps(sums + r * 32 + h * 16 + c * 8);
  for (int64_t k = k_first; k < k_last; k += 32) {
    wanted->step();
#pragma GCC unroll 2
    for (int h = 0; h < H; h++)
      for (int p = 0; p < 16; p++) {
        const __m256i *at = (const __m256i *)(w + k * 32 + h * 512 + p * 32);
        const float *x = a + k + 2 * p;
        fetch_ahead(at);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
          if constexpr (R > 4) __asm__("" : "+r"(at));  // Loaded again: the sums leave no registers to keep it in.
          __m256 part[2];
          for (int c = 0; c < 2; c++) {
            __m256i pairs = _mm256_loadu_si256(at + c);
            part[c] = _mm256_castsi256_ps(odd ? _mm256_and_si256(pairs, high) : _mm256_slli_epi32(pairs, 16));
          }
          for (int r = 0; r < R; r++) {
            __m256 input = _mm256_broadcast_ss(x + r * lda + odd);
            for (int c = 0; c < 2; c++) fma_to(acc[h][r][c], part[c], input);
          }
        }
      }
  }
  for (int h = 0; h < H; h++)
    for (int r = 0; r < R; r++)
      for (int c = 0; c < 2; c++) _mm256_storeu_ps(sums + r * 32 + h * 16 + c * 8, acc[h][r][c]);
}

// Eight columns' sums each += sixteen columns of weights, two inputs of each, times those.
static inline void pair_to(__m256 &low, __m256 &high, const bf16 *w, const float *x) {
  const __m256i odd = _mm256_set1_epi32((int)0xffff0000);
  __m256i a = _mm256_loadu_si256((const __m256i *)w), b = _mm256_loadu_si256((const __m256i *)w + 1);
  __m256 x0 = _mm256_broadcast_ss(x), x1 = _mm256_broadcast_ss(x + 1);
  fma_to(low, _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), x0);
  fma_to(high, _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), x0);
  fma_to(low, _mm256_castsi256_ps(_mm256_and_si256(a, odd)), x1);
  fma_to(high, _mm256_castsi256_ps(_mm256_and_si256(b, odd)), x1);
}

// A lone row reads its panel in the order of memory and asks for nothing ahead: the processor's prefetcher is better at
// that. The halves' chains overlap where one ends. Its sums have names and the loops are written out in parts, for GCC
// keeps those of an array, and those of loops that are wholly written out, in memory.
static __attribute__((noinline)) void bf16_lone(const bf16 *w, const float *a, int64_t k_first, int64_t k_last,
                                                float *sums, bool fresh) {
  __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
  if (!fresh) {
    s0 = _mm256_loadu_ps(sums), s1 = _mm256_loadu_ps(sums + 8);
    s2 = _mm256_loadu_ps(sums + 16), s3 = _mm256_loadu_ps(sums + 24);
  }
  for (int64_t k = k_first; k < k_last; k += 32) {
    const bf16 *block = w + k * 32;
#pragma GCC unroll 4
    for (int p = 0; p < 16; p++) pair_to(s0, s1, block + p * 32, a + k + 2 * p);
#pragma GCC unroll 4
    for (int p = 0; p < 16; p++) pair_to(s2, s3, block + 512 + p * 32, a + k + 2 * p);
  }
  _mm256_storeu_ps(sums, s0), _mm256_storeu_ps(sums + 8, s1);
  _mm256_storeu_ps(sums + 16, s2), _mm256_storeu_ps(sums + 24, s3);
}

template <int R>
static void bf16_rows(const bf16 *w, const Wide *a, int64_t lda, int64_t k_first, int64_t k_last, float *sums,
                      bool fresh, Wanted *wanted, const AddedHere *) {
  if constexpr (R == 1) return bf16_lone(w, a, k_first, k_last, sums, fresh);
  for (int64_t k = k_first; k < k_last; k += kPieceInCache, fresh = false) {
    int64_t last = k_last - k < kPieceInCache ? k_last : k + kPieceInCache;
    for (int h = 0; h < 2; h++) bf16_halves<R, 1>(w + h * 512, a, lda, k, last, sums + h * 16, fresh, wanted);
  }
}
#endif

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
using Byte = int8_t;
constexpr bool kWideBytes = false;
// The instruction wants unsigned x: inputs are packed as x + 128, and 128 times the column's sum comes out again. Exact.
template <int R>
static void i8_rows(const LinearPiece *piece, int64_t panel, int64_t row, const int8_t *a, int64_t lda) {
  const PsWeight *w = piece->job->weight;
  const int8_t *block = (const int8_t *)w->data + panel * w->k_padded * 32;
  __m512i acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
  auto quad = [&](const int8_t *at, int64_t k, int h) {
    __m512i part = _mm512_loadu_si512(at);
    for (int r = 0; r < R; r++) {
      int32_t x;
      memcpy(&x, a + r * lda + k, 4);
      acc[r][h] = dot_bytes(acc[r][h], _mm512_set1_epi32(x), part);
    }
  };
  for (int64_t k = 0; k < w->k_padded; k += 64, block += 2048) {
    if constexpr (R <= kRowsInOrder) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++)
        for (int q = 0; q < 16; q++) {
          fetch_near(block + h * 1024 + q * 64);
          quad(block + h * 1024 + q * 64, k + 4 * q, h);
        }
    } else {
      for (int q = 0; q < 16; q++) {
        fetch_ahead(block + q * 64);
        fetch_ahead(block + 1024 + q * 64);
        quad(block + q * 64, k + 4 * q, 0);
        quad(block + 1024 + q * 64, k + 4 * q, 1);
      }
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

static inline void arrange_bytes(int8_t *row, int64_t padded) {
  for (int64_t i = 0; i < padded; i++) row[i] = (int8_t)(row[i] ^ 0x80);
}
#else
using Byte = int16_t;
constexpr bool kWideBytes = true;
// Bytes are widened to sixteen bits, a weight's once for R rows, inputs' where they are packed: the instruction that
// multiplies bytes wants one operand unsigned, and to give it that takes one more instruction for each row than widening.
// A quad of k lies in two words of 32 bits: k0 and k2, then k1 and k3, as shifts split the weights. Exact.
// As assembly because compilers add up the products first, and have no registers for that.
static inline void add_to(__m256i &acc, __m256i x) { __asm__("vpaddd %1, %0, %0" : "+v"(acc) : "v"(x)); }

template <int R, int H>
static __attribute__((noinline)) void i8_halves(const int8_t *w, int64_t k_first, int64_t k_last, const int16_t *a,
                                                int64_t lda, int32_t *sums, bool fresh) {
  __m256i acc[H][R][2];
  for (int h = 0; h < H; h++)
    for (int r = 0; r < R; r++)
      for (int c = 0; c < 2; c++)
        acc[h][r][c] = fresh ? _mm256_setzero_si256()
                             : _mm256_loadu_si256((const __m256i *)(sums + r * 32 + h * 16 + c * 8));
  for (int64_t k = k_first; k < k_last; k += 64)
#pragma GCC unroll 2
    for (int h = 0; h < H; h++)
      for (int q = 0; q < 16; q++) {
        const __m256i *at = (const __m256i *)(w + k * 32 + h * 1024 + q * 64);
        const int16_t *x = a + k + 4 * q;
        if constexpr (R > kRowsInOrder) fetch_ahead(at);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
          if constexpr (R > 4) __asm__("" : "+r"(at));  // Loaded again, as pairs of bf16 are.
          __m256i part[2];
          for (int c = 0; c < 2; c++) {
            part[c] = _mm256_loadu_si256(at + c);
            part[c] = _mm256_srai_epi16(odd ? part[c] : _mm256_slli_epi16(part[c], 8), 8);
          }
          for (int r = 0; r < R; r++) {
            int32_t two;
            memcpy(&two, x + r * lda + 2 * odd, 4);
            __m256i input = _mm256_set1_epi32(two);
            for (int c = 0; c < 2; c++)
              add_to(acc[h][r][c], _mm256_madd_epi16(part[c], input));
          }
        }
      }
  for (int h = 0; h < H; h++)
    for (int r = 0; r < R; r++)
      for (int c = 0; c < 2; c++)
        _mm256_storeu_si256((__m256i *)(sums + r * 32 + h * 16 + c * 8), acc[h][r][c]);
}

template <int R>
static void i8_rows(const LinearPiece *piece, int64_t panel, int64_t row, const int16_t *a, int64_t lda) {
  const PsWeight *w = piece->job->weight;
  const int8_t *data = (const int8_t *)w->data + panel * w->k_padded * 32;
  constexpr int H = R <= kRowsInOrder ? 2 : 1;
  alignas(64) int32_t sums[R * 32];
  if constexpr (H == 2)
    i8_halves<R, H>(data, 0, w->k_padded, a, lda, sums, true);
  else
    for (int64_t k = 0; k < w->k_padded; k += kPieceInCache) {
      int64_t last = w->k_padded - k < kPieceInCache ? w->k_padded : k + kPieceInCache;
      for (int h = 0; h < 2; h++) i8_halves<R, H>(data + h * 1024, k, last, a, lda, sums + h * 16, k == 0);
    }
  finish_block(piece, panel, row, R, sums);
}

// The bytes in the second half of a row's memory, in place: quads as (k0, k2, k1, k3) of sixteen bits.
static inline void arrange_bytes(int16_t *row, int64_t padded) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const int8_t *bytes = (const int8_t *)row + padded;
  for (int64_t i = 0; i < padded; i += 16) {
    __m128i sixteen = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(bytes + i)), order);
    _mm256_storeu_si256((__m256i *)(row + i), _mm256_cvtepi8_epi16(sixteen));
  }
}
#endif

template <int R>
static void rows_at(const LinearPiece *piece, int64_t panel, int64_t row, Wanted *wanted) {
  const PsWeight *w = piece->job->weight;
  alignas(64) float here[R * 32];
  float *sums = piece->partial ? piece->partial + ((panel - piece->partial_panel) * piece->m_padded + row) * 32 : here;
  bool fresh = piece->k_first == 0;
  int64_t lda = piece->lda;
  AddedHere added;
  bool ends = piece->k_last == w->k_padded,
       is_added = kAddsHere && w->type == PS_BF16 && ends && find_added(piece, panel, row, R, &added);
  if (w->type == PS_BF16)
    bf16_rows<R>((const bf16 *)w->data + panel * w->k_padded * 32, (const Wide *)piece->a + row * lda, lda,
                 piece->k_first, piece->k_last, sums, fresh, wanted, is_added ? &added : nullptr);
  else if (w->type == PS_F32)
    f32_rows<R>((const float *)w->data + panel * w->k_padded * 32, (const float *)piece->a + row * lda, lda,
                piece->k_first, piece->k_last, sums, fresh);
  else if (w->type == PS_I8)
    return i8_rows<R>(piece, panel, row, (const Byte *)piece->a + row * lda, lda);
  if (ends) is_added ? finish_sums(piece, panel, row, R, sums) : finish_block(piece, panel, row, R, sums);
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
      Byte *row = (Byte *)a + r * padded;
      int8_t *out = (int8_t *)(row + padded) - padded;
      quantize_row(job, r, out, 64, a_scale + r);
      arrange_bytes(row, padded);
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

static void vector_int4(const LinearPiece *piece, int64_t panel) {
  int4_panel(
      piece, panel, [](const uint8_t *) {},
      [piece](const uint8_t *nibbles, int64_t g, int64_t row, int64_t rows, int32_t *sums) {
        // As long as each other but for the last one: this is asked for every group, and the even split below made the
        // products of ten rows a tenth slower here.
        int64_t blocks = (rows + kNibbleRows - 1) / kNibbleRows, block = (rows + blocks - 1) / blocks;
        for (int64_t r = 0; r < rows; r += block)
          nibble_rows_left<kNibbleRows>(piece, nibbles, g, row + r, rows - r < block ? rows - r : block, sums + r * 32);
      });
}

static void vector_linear(const LinearPiece *piece, int64_t panel_first, int64_t panel_last) {
  int64_t m = piece->job->m, most = piece->job->weight->type == PS_I8 ? kByteRows : kRowBlock;
  int64_t blocks = (m + most - 1) / most, steps = (piece->k_last - piece->k_first) / 32;
  // With few rows the weights themselves come no faster than they are computed with.
  Wanted wanted(piece, m < kAheadRows ? 0 : (panel_last - panel_first) * blocks * steps);
  for (int64_t panel = panel_first; panel < panel_last; panel++) {
    if (piece->job->weight->type == PS_I4) {
      vector_int4(piece, panel);
      continue;
    }
    // Blocks that differ by one row at most: a short one would read the weights for little.
    for (int64_t b = 0; b < blocks; b++)
      rows_left<kRowBlock>(piece, panel, b * m / blocks, (b + 1) * m / blocks - b * m / blocks, &wanted);
  }
}

}  // namespace
