// Drawing one token from each row of logits, as engine/sampler.py says: greedy, or Gumbel-max over the tokens that
// top-k, top-p and min-p keep. No sorting: a histogram finds the interval in which a cut lies, and only that one's
// tokens are ranked.
#pragma once
#include "table.h"
#include "vec.h"

namespace {

using penstock::kSampleBins;
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));

static inline U16 bits_of(F16 x) {
  U16 bits;
  memcpy(&bits, &x, 64);
  return bits;
}
static inline F16 from_bits(U16 bits) {
  F16 x;
  memcpy(&x, &bits, 64);
  return x;
}
static inline F16 to_float(I16 x) {
  auto converted = __builtin_convertvector(x, float __attribute__((vector_size(64))));
  F16 y;
  memcpy(&y, &converted, 64);
  return y;
}

// Natural logarithm of normal positive numbers to within 2 ulp: 2 atanh(f / (2 + f)) on [sqrt(1/2), sqrt(2)], by the
// series of the inverse hyperbolic tangent, plus the exponent's share in two parts.
static inline F16 vlog(F16 x) {
  U16 shifted = bits_of(x) + (0x3f800000u - 0x3f3504f3u);
  F16 k = to_float((I16)(shifted >> 23) - 127);
  F16 f = from_bits((shifted & 0x7fffffu) + 0x3f3504f3u) - set1(1.0f);
  F16 s = f / (set1(2.0f) + f), z = s * s;
  F16 p = set1(1.0f / 11);
  p = fma(p, z, set1(1.0f / 9));
  p = fma(p, z, set1(1.0f / 7));
  p = fma(p, z, set1(1.0f / 5));
  p = fma(p, z, set1(1.0f / 3));
  // log(1 + f) = f - s * (f - 2 z s p): the leading term is exact.
  F16 rest = fma(set1(-2.0f) * z, p, f) * s;
  F16 low = fma(k, set1(9.0580006145e-06f), zero() - rest);
  return fma(k, set1(6.9313812256e-01f), low + f);
}

static inline U16 avalanche(U16 x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Uniform variates in (0, 1) for tokens first .. first + 15.
static inline F16 uniform(uint32_t first, const int32_t *keys) {
  U16 ids = first + (U16){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  U16 x = avalanche(ids * 0x9e3779b9u + (uint32_t)keys[0]);
  x = avalanche(x ^ (uint32_t)keys[1]);
  F16 u = (to_float((I16)(x & 0x7fffffffu)) + set1(0.5f)) * set1(0x1p-31f);
  return vmin(u, set1(1.0f - 0x1p-24f));
}

// -log(-log(1 - u)): what Gumbel-max adds.
static inline F16 gumbel(F16 u) {
  // log1p(-u) = log(w) (-u) / (w - 1), with w = 1 - u as rounded (Kahan); where w is 1, it is -u.
  F16 w = set1(1.0f) - u, less = w - set1(1.0f);
  U16 tiny = (U16)(bits_of(w) == 0x3f800000u);
  F16 safe = from_bits((bits_of(less) & ~tiny) | (bits_of(set1(-1.0f)) & tiny));
  F16 exponential = vlog(w) * u / safe;  // Twice negative: positive.
  exponential = from_bits((bits_of(exponential) & ~tiny) | (bits_of(u) & tiny));
  return zero() - vlog(exponential);
}

struct SampleRow {
  const float *logits;
  int64_t vocab;
  float top, temperature;
  const uint32_t *allowed;  // bits of the tokens, if 16 of them may be passed over when none is set; else null
};

static inline uint32_t bits_at(const uint32_t *bits, int64_t i) { return bits[i / 32] >> (i & 16) & 0xffffu; }

// Whether none of the 16 tokens from i on can be drawn. A grammar often allows a dozen of them all.
static inline bool is_passed(const SampleRow &row, int64_t i) { return row.allowed && !bits_at(row.allowed, i); }

// Logits 16 at a time, less the largest, over the temperature: at most 0; beyond the vocabulary minus infinity.
static inline F16 scaled_at(const SampleRow &row, int64_t i) {
  F16 x = keep_lanes(load_tail(row.logits + i, row.vocab - i), 0, row.vocab - i);
  return (x - set1(row.top)) / set1(row.temperature);
}

// Smaller keys rank first: by value, then by lowest id. `away` is the bit pattern of how far a value is below the top.
static inline uint64_t rank_key(uint32_t away, int64_t id) { return (uint64_t)away << 32 | (uint32_t)id; }

static inline U16 away_bits(F16 scaled) { return bits_of(scaled) & 0x7fffffffu; }
static inline float away_of(uint64_t key) {
  uint32_t bits = (uint32_t)(key >> 32);
  float away;
  memcpy(&away, &bits, 4);
  return away;
}

// Intervals of 1/128 below the top; the last has all the rest. Monotonic, since scaling by 128 is exact.
static inline I16 bins_of(F16 scaled) {
  F16 far = vmin(from_bits(away_bits(scaled)) * set1(128.0f), set1((float)(kSampleBins - 1)));
  float lanes __attribute__((vector_size(64)));
  memcpy(&lanes, &far, 64);
  return __builtin_convertvector(lanes, I16);
}

static void sift_down(uint64_t *heap, int64_t at, int64_t count) {
  for (int64_t child; (child = 2 * at + 1) < count; at = child) {
    if (child + 1 < count && heap[child + 1] > heap[child]) child++;
    if (heap[at] >= heap[child]) return;
    uint64_t swap = heap[at];
    heap[at] = heap[child], heap[child] = swap;
  }
}
static void sort_keys(uint64_t *keys, int64_t count) {
  for (int64_t at = count / 2; at-- > 0;) sift_down(keys, at, count);
  for (int64_t last = count - 1; last > 0; last--) {
    uint64_t swap = keys[0];
    keys[0] = keys[last], keys[last] = swap;
    sift_down(keys, 0, last);
  }
}

struct Histogram {
  double *mass;    // [kSampleBins]
  int32_t *count;  // [kSampleBins]
  int32_t *least;  // [vocab / 16] the bin of each 16's largest
  uint64_t *keys;  // [vocab], of one bin
  float *masked;   // [vocab] logits of a row with a mask

  Histogram(void *scratch, int64_t vocab) {
    mass = (double *)scratch;
    count = (int32_t *)(mass + kSampleBins);
    keys = (uint64_t *)(count + kSampleBins);
    least = (int32_t *)(keys + vocab);
    masked = (float *)(least + vocab / 16 + 1);
  }
};

// A bin that has the k-th largest, or comes after it: k 16s have their largest up to there.
static int32_t find_far_bin(const SampleRow &row, Histogram h, int64_t k) {
  memset(h.count, 0, sizeof(int32_t) * kSampleBins);
  for (int64_t i = 0; i < row.vocab; i += 16) {
    int32_t bin = bins_of(set1(max_lanes(scaled_at(row, i))))[0];
    h.least[i / 16] = bin;
    h.count[bin]++;
  }
  int64_t found = 0;
  for (int32_t bin = 0; bin < kSampleBins; bin++)
    if ((found += h.count[bin]) >= k) return bin;
  return kSampleBins - 1;
}

// Counts and weighs the tokens up to a bin; returns their mass.
static double fill(const SampleRow &row, Histogram h, int32_t far) {
  memset(h.mass, 0, sizeof(double) * kSampleBins);
  memset(h.count, 0, sizeof(int32_t) * kSampleBins);
  for (int64_t i = 0; i < row.vocab; i += 16) {
    if (h.least[i / 16] > far) continue;
    F16 scaled = scaled_at(row, i);
    I16 bins = bins_of(scaled);
    float weights[16];
    store(weights, vexp(scaled));
    int64_t lanes = row.vocab - i < 16 ? row.vocab - i : 16;
    for (int64_t lane = 0; lane < lanes; lane++) {
      h.mass[bins[lane]] += weights[lane];
      h.count[bins[lane]]++;
    }
  }
  double total = 0;
  for (int64_t bin = 0; bin < kSampleBins; bin++) total += h.mass[bin];
  return total;
}

// The keys of one bin, ranked.
static int64_t rank_bin(const SampleRow &row, Histogram h, int32_t bin) {
  int64_t found = 0;
  for (int64_t i = 0; i < row.vocab; i += 16) {
    if (h.least[i / 16] > bin) continue;
    F16 scaled = scaled_at(row, i);
    I16 bins = bins_of(scaled), hits = bins == bin;
    U16 away = away_bits(scaled);
    int64_t lanes = row.vocab - i < 16 ? row.vocab - i : 16;
    for (int64_t lane = 0; lane < lanes; lane++)
      if (hits[lane]) h.keys[found++] = rank_key(away[lane], i + lane);
  }
  sort_keys(h.keys, found);
  return found;
}

static double weight_of(uint64_t key) {
  float out[16];
  store(out, vexp(set1(-away_of(key))));
  return out[0];
}

// The last key that top-k and top-p keep; at least one token is kept. top_k 0 and top_p 1 are off.
static uint64_t last_kept(const SampleRow &row, Histogram h, int64_t top_k, double top_p) {
  double total = fill(row, h, find_far_bin(row, h, top_k > 0 ? top_k : row.vocab));
  uint64_t cut = ~0ull;
  if (top_k > 0) {
    int64_t before = 0;
    int32_t bin = 0;
    total = 0;
    while (before + h.count[bin] < top_k) before += h.count[bin], total += h.mass[bin], bin++;
    rank_bin(row, h, bin);
    cut = h.keys[top_k - before - 1];
    for (int64_t i = 0; i < top_k - before; i++) total += weight_of(h.keys[i]);
  }
  if (top_p >= 1.0) return cut;
  double before = 0, limit = top_p * total;
  int32_t bin = 0, last = 0;
  for (; bin < kSampleBins && before < limit; bin++)
    if (h.count[bin]) last = bin, before += h.mass[bin];
  before -= h.mass[last];
  int64_t found = rank_bin(row, h, last), kept = 0;
  for (double mass = before; kept < found && (kept == 0 || mass < limit); kept++) mass += weight_of(h.keys[kept]);
  uint64_t nucleus = h.keys[kept - 1];
  return nucleus < cut ? nucleus : cut;
}

// The largest score among tokens up to the `cut` and not below `bound`; ties by lowest id.
static int64_t draw(const SampleRow &row, int64_t likeliest, uint64_t cut, float bound, const int32_t *keys) {
  float scores[16];
  store(scores, gumbel(uniform((uint32_t)likeliest, keys)));
  float best = scores[0];
  int64_t drawn = likeliest;
  uint32_t cut_away = (uint32_t)(cut >> 32), cut_id = (uint32_t)cut;
  for (int64_t i = 0; i < row.vocab; i += 16) {
    if (is_passed(row, i)) continue;
    F16 scaled = scaled_at(row, i);
    // A score is at most scaled - log(u), so it can only win where u <= e^(scaled - best); the factor covers rounding.
    F16 u = uniform((uint32_t)i, keys), chance = vexp(scaled - set1(best)) * set1(1.0001f);
    if (max_lanes(chance - u) < 0) continue;
    float values[16];
    U16 away = away_bits(scaled);
    store(scores, scaled + gumbel(u));
    store(values, scaled);
    for (int lane = 0; lane < 16 && i + lane < row.vocab; lane++) {
      if (scores[lane] < best || (scores[lane] == best && i + lane >= drawn)) continue;
      bool kept = away[lane] < cut_away || (away[lane] == cut_away && (uint32_t)(i + lane) <= cut_id);
      if (kept && values[lane] >= bound) best = scores[lane], drawn = i + lane;
    }
  }
  return drawn;
}

// The first of the largest logits; -1 where one is not a number or the largest not finite.
static int64_t find_likeliest(SampleRow &row) {
  F16 top = set1(-__builtin_inff()), nan = zero();
  for (int64_t i = 0; i < row.vocab; i += 16) {
    if (is_passed(row, i)) continue;
    F16 x = keep_lanes(load_tail(row.logits + i, row.vocab - i), 0, row.vocab - i);
    top = vmax(top, x);
    nan = keep_nan(x, nan);
  }
  row.top = max_lanes(top);
  if (max_lanes(nan) != 0 || !(row.top - row.top == 0)) return -1;
  int64_t first = 0;
  while (is_passed(row, first) || row.logits[first] != row.top) first += is_passed(row, first) ? 16 - first % 16 : 1;
  return first;
}

static inline F16 keep_bits(F16 x, uint32_t bits) {
  U16 lanes = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  U16 kept = (U16)((lanes & bits) != 0);
  return from_bits((bits_of(x) & kept) | (bits_of(set1(-__builtin_inff())) & ~kept));
}

// The logits of the tokens whose bits are set, minus infinity for the others. Unless `whole`, 16 of which no bit is
// set are left as they are: nothing reads them.
static void mask_logits(const float *logits, const uint32_t *bits, int64_t vocab, bool whole, float *out) {
  for (int64_t i = 0; i < vocab; i += 16) {
    uint32_t some = bits_at(bits, i);
    if (!some && !whole) continue;
    store_tail(out + i, keep_bits(load_tail(logits + i, vocab - i), some), vocab - i);
  }
}

static void sample_row(const PsSample *job, int64_t r, void *scratch) {
  SampleRow row = {job->logits + r * job->ld_logits, job->vocab, 0, job->temperature[r], nullptr};
  bool greedy = row.temperature < job->greedy_below;
  int64_t top_k = job->top_k[r] < job->vocab ? job->top_k[r] : 0;
  bool cuts = !greedy && (top_k > 0 || job->top_p[r] < 1.0);
  if (job->masks && job->mask_rows[r] >= 0) {
    const uint32_t *bits = job->masks + job->mask_rows[r] * job->ld_masks;
    float *masked = Histogram(scratch, job->vocab).masked;
    mask_logits(row.logits, bits, job->vocab, cuts, masked);
    row.logits = masked;
    if (!cuts) row.allowed = bits;
  }
  int64_t likeliest = find_likeliest(row);
  job->token_ids[r] = likeliest;
  if (likeliest < 0 || greedy) return;
  uint64_t cut = cuts ? last_kept(row, Histogram(scratch, job->vocab), top_k, job->top_p[r]) : ~0ull;
  job->token_ids[r] = draw(row, likeliest, cut, job->min_p_bound[r], job->keys + 2 * r);
}

}  // namespace
