// Sixteen lanes of float on whatever vectors this translation unit is compiled for.
//
// Every kernel is written once against F16 and compiled once per instruction set. Everything lives in an
// unnamed namespace and uses no library templates: an inline function shared between translation units
// with different -m flags could be merged by the linker into the one that this machine cannot run.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

using bf16 = uint16_t;

#ifdef __AVX512F__

struct F16 {
  __m512 v;
};
static inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F16 load(const float *p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float *p, F16 a) { _mm512_storeu_ps(p, a.v); }
static inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F16 vmax(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F16 vmin(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// Sums and maxima over lanes always pair the lanes in the same order. A NaN is any lane's maximum.
static inline float sum_lanes(F16 a) { return _mm512_reduce_add_ps(a.v); }
static inline float max_lanes(F16 a) {
  float top = _mm512_reduce_max_ps(a.v);
  return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) ? __builtin_nanf("") : top;
}
// Lanes [from, to) of a, minus infinity in the others.
static inline F16 keep_lanes(F16 a, int64_t from, int64_t to) {
  uint32_t below_to = to >= 16  ? 0xffffu
                      : to <= 0 ? 0u
                                : (1u << to) - 1,
           below_from = from >= 16  ? 0xffffu
                        : from <= 0 ? 0u
                                    : (1u << from) - 1;
  return {_mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), (__mmask16)(below_to & ~below_from), a.v)};
}
static inline F16 vround(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for integral n in [-252, 252], by two multiplications so that results may be subnormal.
static inline F16 scale2(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// a where x is not NaN, else x: keeps NaN visible through clamps.
static inline F16 keep_nan(F16 x, F16 a) {
  return {_mm512_mask_mov_ps(a.v, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), x.v)};
}
static inline F16 load_bf16(const bf16 *p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16))};
}
static inline F16 load(const int32_t *p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
static inline F16 load_i8(const int8_t *p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)))};
}
#ifdef __AVX512BF16__
static inline __m256i to_bf16(F16 a) { return (__m256i)_mm512_cvtneps_pbh(a.v); }
static inline void store_32(bf16 *p, F16 a, F16 b) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)); }
#else
static inline __m256i to_bf16(F16 a) {
  // Round to nearest even by integer arithmetic; NaN becomes the quiet NaN instead of overflowing to infinity.
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff))), 16);
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(rounded);
}
static inline void store_32(bf16 *p, F16 a, F16 b) {
  _mm256_storeu_si256((__m256i *)p, to_bf16(a));
  _mm256_storeu_si256((__m256i *)(p + 16), to_bf16(b));
}
#endif
static inline void store_bf16(bf16 *p, F16 a) { _mm256_storeu_si256((__m256i *)p, to_bf16(a)); }
static inline void store_i8(int8_t *p, F16 a) {
  _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// Sixteen pairs of bf16 and one pair of inputs, ready to be multiplied: where there is no instruction for it, each is
// widened once and serves many products.
#ifdef __AVX512BF16__
struct Pairs {
  __m512i v;
};
using PairInput = Pairs;
static inline Pairs load_pairs(const bf16 *p) { return {_mm512_loadu_si512(p)}; }
static inline PairInput spread_pair(const bf16 *x) {
  int32_t word;
  memcpy(&word, x, 4);
  return {_mm512_set1_epi32(word)};
}
// acc + even products, then + odd products.
static inline F16 dot(F16 acc, Pairs w, PairInput x) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)x.v)}; }
#else
struct Pairs {
  F16 even, odd;
};
using PairInput = Pairs;
static inline Pairs widen_pairs(__m512i w) {
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000)))}};
}
static inline Pairs load_pairs(const bf16 *p) { return widen_pairs(_mm512_loadu_si512(p)); }
static inline PairInput spread_pair(const bf16 *x) {
  int32_t word;
  memcpy(&word, x, 4);
  return widen_pairs(_mm512_set1_epi32(word));
}
#endif
#ifdef __AVX512VNNI__
// As assembly because compilers copy the accumulators of the intrinsic to and fro, at twice the instructions.
static inline __m512i dot_bytes(__m512i acc, __m512i unsigned_bytes, __m512i signed_bytes) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(unsigned_bytes), "v"(signed_bytes));
  return acc;
}
#endif
// Products of sixteen times four unsigned bytes of w, 15 at most, with four signed bytes of x (as 32 bits), added up by
// fours, or by twos in sixteen bits and then by fours. Exact. As assembly because compilers add up the products first.
struct Bytes64 {
  __m512i v;
};
static inline Bytes64 load_ints(const void *p) { return {_mm512_loadu_si512(p)}; }
static inline Bytes64 low_nibbles(Bytes64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
static inline Bytes64 high_nibbles(Bytes64 a) { return low_nibbles({_mm512_srli_epi32(a.v, 4)}); }
#ifdef __AVX512VNNI__
static inline Bytes64 zero_ints() { return {_mm512_setzero_si512()}; }
static inline void store(int32_t *p, Bytes64 a) { _mm512_storeu_si512(p, a.v); }
static inline Bytes64 dot_nibbles(Bytes64 acc, Bytes64 w, int32_t x) { return {dot_bytes(acc.v, w.v, _mm512_set1_epi32(x))}; }
#else
static inline Bytes64 dot_two(Bytes64 w, int32_t x) { return {_mm512_maddubs_epi16(w.v, _mm512_set1_epi32(x))}; }
static inline void add_twos(Bytes64 &acc, Bytes64 x) { __asm__("vpaddw %1, %0, %0" : "+v"(acc.v) : "v"(x.v)); }
static inline void add_fours(int32_t *p, Bytes64 x) {
  __m512i fours = _mm512_madd_epi16(x.v, _mm512_set1_epi16(1));
  _mm512_storeu_si512(p, _mm512_add_epi32(_mm512_loadu_si512(p), fours));
}
#endif
// out[2i] = a[i], out[2i+1] = b[i] for 16 values each.
static inline void interleave_bf16(bf16 *out, const bf16 *a, const bf16 *b) {
  __m512i lo = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)a));
  __m512i hi = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)b)), 16);
  _mm512_storeu_si512(out, _mm512_or_si512(lo, hi));
}
// out[c * ld_out + r] = rows[r][c] for a 16 x 16 square of 32-bit words; rows[r] may be null, meaning zeros.
static inline void transpose_words(uint32_t *out, int64_t ld_out, const uint32_t *const rows[16]) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = rows[i] ? _mm512_loadu_si512(rows[i]) : _mm512_setzero_si512();
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    _mm512_storeu_si512(out + i * ld_out, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(out + (i + 8) * ld_out, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
  }
}

#else  // AVX2 and FMA: two halves.

struct F16 {
  __m256 a, b;
};
static inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F16 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float *p, F16 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
static inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F16 vmax(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F16 vmin(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline float sum_lanes(F16 x) {
  __m256 s8 = _mm256_add_ps(x.a, x.b);
  __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  s4 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s4, _mm_movehdup_ps(s4)));
}
static inline float max_lanes(F16 x) {
  __m256 nan = _mm256_or_ps(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q));
  if (_mm256_movemask_ps(nan)) return __builtin_nanf("");
  __m256 m8 = _mm256_max_ps(x.a, x.b);
  __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
  m4 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
  return _mm_cvtss_f32(_mm_max_ss(m4, _mm_movehdup_ps(m4)));
}
static inline F16 keep_lanes(F16 x, int64_t from, int64_t to) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), eight = _mm256_set1_epi32(8);
  int low = from < 0 ? 0 : from > 16 ? 16 : (int)from, high = to < 0 ? 0 : to > 16 ? 16 : (int)to;
  __m256i at_least = _mm256_set1_epi32(low - 1), below = _mm256_set1_epi32(high);
  __m256 none = _mm256_set1_ps(-__builtin_inff());
  __m256i keep_a = _mm256_and_si256(_mm256_cmpgt_epi32(lane, at_least), _mm256_cmpgt_epi32(below, lane));
  lane = _mm256_add_epi32(lane, eight);
  __m256i keep_b = _mm256_and_si256(_mm256_cmpgt_epi32(lane, at_least), _mm256_cmpgt_epi32(below, lane));
  return {_mm256_blendv_ps(none, x.a, _mm256_castsi256_ps(keep_a)),
          _mm256_blendv_ps(none, x.b, _mm256_castsi256_ps(keep_b))};
}
static inline F16 vround(F16 x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline __m256 scale2_half(__m256 x, __m256 n) {
  __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
  __m256 f0 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  __m256 f1 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(x, f0), f1);
}
static inline F16 scale2(F16 x, F16 n) { return {scale2_half(x.a, n.a), scale2_half(x.b, n.b)}; }
static inline F16 keep_nan(F16 x, F16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
}
static inline __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
static inline F16 load_bf16(const bf16 *p) {
  return {widen(_mm_loadu_si128((const __m128i *)p)), widen(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
static inline __m256i round_half(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff))), 16);
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
static inline void store_bf16(bf16 *p, F16 x) {
  __m256i packed = _mm256_packus_epi32(round_half(x.a), round_half(x.b));
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline void store_i8(int8_t *p, F16 x) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  words = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
static inline F16 load(const int32_t *p) {
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)p)),
          _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)(p + 8)))};
}
static inline F16 load_i8(const int8_t *p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8))))};
}
static inline void store_32(bf16 *p, F16 a, F16 b) {
  store_bf16(p, a);
  store_bf16(p + 16, b);
}
struct Pairs {
  F16 even, odd;
};
using PairInput = Pairs;
static inline Pairs widen_pairs(__m256i a, __m256i b) {
  __m256i high = _mm256_set1_epi32((int)0xffff0000);
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))}};
}
static inline Pairs load_pairs(const bf16 *p) {
  return widen_pairs(_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 16)));
}
// acc += w * x. As assembly because compilers copy and spill the sums of an unrolled loop.
static inline void fma_to(__m256 &acc, __m256 w, __m256 x) {
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
}
static inline PairInput spread_pair(const bf16 *x) {
  int32_t word;
  memcpy(&word, x, 4);
  return widen_pairs(_mm256_set1_epi32(word), _mm256_set1_epi32(word));
}
struct Bytes64 {
  __m256i a, b;
};
static inline Bytes64 load_ints(const void *p) {
  return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
static inline Bytes64 low_nibbles(Bytes64 x) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
static inline Bytes64 high_nibbles(Bytes64 x) { return low_nibbles({_mm256_srli_epi32(x.a, 4), _mm256_srli_epi32(x.b, 4)}); }
static inline Bytes64 dot_two(Bytes64 w, int32_t x) {
  __m256i spread = _mm256_set1_epi32(x);
  return {_mm256_maddubs_epi16(w.a, spread), _mm256_maddubs_epi16(w.b, spread)};
}
static inline void add_twos(Bytes64 &acc, Bytes64 x) {
  __asm__("vpaddw %1, %0, %0" : "+x"(acc.a) : "x"(x.a));
  __asm__("vpaddw %1, %0, %0" : "+x"(acc.b) : "x"(x.b));
}
static inline void add_fours(int32_t *p, Bytes64 x) {
  __m256i *at = (__m256i *)p, ones = _mm256_set1_epi16(1);
  _mm256_storeu_si256(at, _mm256_add_epi32(_mm256_loadu_si256(at), _mm256_madd_epi16(x.a, ones)));
  _mm256_storeu_si256(at + 1, _mm256_add_epi32(_mm256_loadu_si256(at + 1), _mm256_madd_epi16(x.b, ones)));
}
static inline void interleave_bf16(bf16 *out, const bf16 *a, const bf16 *b) {
  for (int i = 0; i < 16; i += 8) {
    __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(a + i)));
    __m256i hi = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(b + i))), 16);
    _mm256_storeu_si256((__m256i *)(out + 2 * i), _mm256_or_si256(lo, hi));
  }
}
static inline void transpose_words(uint32_t *out, int64_t ld_out, const uint32_t *const rows[16]) {
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 16; c++) out[c * ld_out + r] = rows[r] ? rows[r][c] : 0;
}

#endif

static inline void store_32(float *p, F16 a, F16 b) {
  store(p, a);
  store(p + 16, b);
}

static inline F16 zero() { return set1(0.0f); }

// Asks for what a stream of weights will read soon. The processor's own prefetcher stops at every 4 KiB, and with
// more than one row there is too much arithmetic between loads for it to run far enough ahead. Never faults.
constexpr int64_t kNearBytes = 2048, kAheadBytes = 8192, kThinAheadBytes = 4096;
// Into the second cache, which can wait for more lines at once than the first: a cold row takes half the time on Zen 4.
static inline void fetch_ahead(const void *p) { _mm_prefetch((const char *)p + kAheadBytes, _MM_HINT_T1); }
// For streams that few rows read in order: the processor's own prefetcher gives nearly all that memory has.
[[maybe_unused]] static inline void fetch_near(const void *p) { _mm_prefetch((const char *)p + kNearBytes, _MM_HINT_T1); }
// Into the first, for streams that are thin enough for it.
static inline void fetch_thin(const void *p) { _mm_prefetch((const char *)p + kThinAheadBytes, _MM_HINT_T0); }

#ifndef __AVX512BF16__
static inline F16 dot(F16 acc, Pairs w, PairInput x) { return fma(w.odd, x.odd, fma(w.even, x.even, acc)); }
#endif

// Products of sixteen columns with one input, for kernels over either type: `size` inputs to a step.
template <class T>
struct Product;
template <>
struct Product<float> {
  using Weights = F16;
  using Input = F16;
  static constexpr int64_t size = 1;
  static inline F16 weights(const float *p) { return load(p); }
  static inline F16 input(const float *x) { return set1(*x); }
  static inline F16 add(F16 acc, F16 w, F16 x) { return fma(x, w, acc); }
};
template <>
struct Product<bf16> {
  using Weights = Pairs;
  using Input = PairInput;
  static constexpr int64_t size = 2;
  static inline Pairs weights(const bf16 *p) { return load_pairs(p); }
  static inline PairInput input(const bf16 *x) { return spread_pair(x); }
  static inline F16 add(F16 acc, Pairs w, PairInput x) { return dot(acc, w, x); }
};

// 2^x to within 2 ulp. 2^0 is exactly 1, very negative inputs give 0, large ones infinity. The clamps' operands are
// ordered so that NaN, the second, comes through. (Coefficients: Taylor's, on [-1/2, 1/2].)
static inline F16 vexp2(F16 x) {
  F16 y = vmin(set1(129.0f), vmax(set1(-151.0f), x));
  F16 n = vround(y), r = y - n;
  F16 p = set1(1.5403530393381609e-4f);
  p = fma(p, r, set1(1.3333558146428443e-3f));
  p = fma(p, r, set1(9.6181291076284772e-3f));
  p = fma(p, r, set1(5.5504108664821580e-2f));
  p = fma(p, r, set1(2.4022650695910071e-1f));
  p = fma(p, r, set1(6.9314718055994531e-1f));
  p = fma(p, r, set1(1.0f));
  return scale2(p, n);
}

constexpr float kLog2E = 1.44269504088896341f;

// e^x to within 2 ulp, from 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; NaN and the ends as in vexp2.
// (Cody and Waite, Software Manual for the Elementary Functions, 1980.)
static inline F16 vexp(F16 x) {
  F16 y = vmin(set1(90.0f), vmax(set1(-105.0f), x));
  F16 n = vround(y * set1(kLog2E));
  F16 r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return scale2(p, n);
}

static inline F16 silu(F16 x) { return x / (set1(1.0f) + vexp(zero() - x)); }

// x * (1 + tanh(u)) / 2, which is x / (1 + exp(-2u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
static inline F16 gelu_tanh(F16 x) {
  F16 u = x * fma(x * x, set1(0.044715f), set1(1.0f)) * set1(-2.0f * 0.7978845608028654f);
  return x / (set1(1.0f) + vexp(u));
}

static inline F16 soft_cap(F16 x, float cap) {  // cap * tanh(x / cap)
  F16 e = vexp(x * set1(2.0f / cap));
  return set1(cap) * (set1(1.0f) - set1(2.0f) / (e + set1(1.0f)));
}

// Element types by overload, so that kernels are templates over float and bf16 storage.
static inline F16 load_as_float(const float *p) { return load(p); }
static inline F16 load_as_float(const bf16 *p) { return load_bf16(p); }
static inline void store_from_float(float *p, F16 a) { store(p, a); }
static inline void store_from_float(bf16 *p, F16 a) { store_bf16(p, a); }

template <class T>
static inline F16 load_tail(const T *p, int64_t n) {
  if (n >= 16) return load_as_float(p);
  T t[16] = {};
  memcpy(t, p, (size_t)n * sizeof(T));
  return load_as_float(t);
}
template <class T>
static inline void store_tail(T *p, F16 a, int64_t n) {
  if (n >= 16) return store_from_float(p, a);
  T t[16];
  store_from_float(t, a);
  memcpy(p, t, (size_t)n * sizeof(T));
}

}  // namespace
