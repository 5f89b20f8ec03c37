// What one instruction set offers: single-threaded pieces that api.cpp spreads over the pool.
#pragma once
#include "penstock_native.h"

namespace penstock {

constexpr int64_t kAdapterParts = 3;  // of a fused linear: queries, keys, values
constexpr int64_t kAdapterRanks = kAdapterParts * PS_ADAPTER_RANK_MAX;

// What an adapter adds to 16 outputs: `inner` from `from` on by B^T.
struct AddedHalf {
  const void *b;  // [rank / s][16][s], see PsAdapterPart
  int32_t from, rank;  // rank 0: nothing
};

// What is added to a linear's sums before anything else; see adapter_rows.h.
struct LinearAdded {
  const int32_t *adapters;  // [m] of a row among the adapters, or -1; null: no row has one
  const int32_t *places;    // [m] of a row in `inner`; rows of one adapter follow each other
  const char *inner;        // [places][kAdapterRanks] of the inputs' type
  const AddedHalf *halves;  // [adapters][panels, `most` of them, from `panel` on][2]
  int64_t most, panel;
};

// Memory that is read soon: so many lines of 64 bytes.
struct LinearAhead {
  const char *at;
  int64_t lines;
};

// A piece of a linear: inputs [k_first, k_last), every row. Between pieces of k the sums wait in `partial`.
struct LinearPiece {
  const PsLinear *job;
  const void *a;                    // packed inputs, see pack_rows
  int64_t lda;                      // elements between rows of a, where a is row-major
  const float *a_scale;             // I8: [m]; I4: GroupInput [m][groups]
  float *partial;                   // [panels of the slab][m_padded][32], or null when k is done in one piece
  int64_t m_padded, partial_panel;  // partial's first panel
  int64_t k_first, k_last;
  LinearAdded added;         // where k ends
  const LinearAhead *ahead;  // [num_ahead], to be fetched where there is much to compute for each byte
  int64_t num_ahead;
};

struct RoundJob {  // W [n, k] to `type`; see rounding.h
  const void *x;
  void *values;  // [n, k], a byte each
  float *scale;  // [n] or [n, groups]
  int64_t ldx, k, group;
  int32_t x_type, type;
};

struct AttentionPiece {
  const PsAttention *job;
  int64_t row, kv_head, lane_first, lane_count;  // lanes are (query token, query head of the group), flattened
  bool fetched, another;  // the piece before was the head before; the piece after is the head after
  void *scratch;
};

// Tokens of one adapter by one linear; see adapter_rows.h.
struct AdapterPiece {
  const PsAdapterLinear *linear;
  const char *x;  // rows row_bytes apart
  int64_t row_bytes;
  const int32_t *tokens;  // [count] rows of x
  int32_t type;
  int64_t count;
  char *inner;  // [count][kAdapterRanks] of `type`
};

struct KernelTable {
  const char *name;
  int32_t row_tile;      // rows to a packed input tile; 0: inputs stay row-major
  int32_t weight_types;  // bit set of PsType
  bool wide_inputs;      // inputs of bf16 weights are packed as floats
  bool wide_bytes;       // inputs of int8 weights are packed as sixteen bits
  void (*pack_rows)(const PsLinear *job, int64_t first, int64_t last, void *a, float *a_scale);
  void (*linear)(const LinearPiece *piece, int64_t panel_first, int64_t panel_last);
  void (*rms_norm)(const PsNorm *job, int64_t first, int64_t last);
  void (*silu_mul)(const PsSiluMul *job, int64_t first, int64_t last);
  void (*rope_write)(const PsRopeWrite *job, int64_t first, int64_t last);
  void (*attention)(const AttentionPiece *piece);
  void (*sample_row)(const PsSample *job, int64_t row, void *scratch);  // see sample_scratch_bytes
  void (*transpose)(uint32_t *out, const uint32_t *const rows[16]);  // 16 x 16 words; a null row is zeros
  void (*round_rows)(const RoundJob *job, int64_t first, int64_t last);
  void (*scale_values)(void *x, int32_t type, int64_t n, float factor);  // x *= factor
  void (*cap_values)(float *x, int64_t n, float cap);                    // x = cap * tanh(x / cap)
  void (*adapter_shrink)(const AdapterPiece *piece, int64_t panel_first, int64_t panel_last);
};

constexpr int64_t kRowsMax = 512;         // rows of a linear done together
constexpr int64_t kAttentionLanes = 192;  // lanes to a work item: they share the packing of keys and values
constexpr int64_t kLanesAtOnce = 64;      // lanes whose scores are in the cache together
constexpr int64_t kKvTile = 64;           // tokens to a softmax step; part of the numerics, so never tuned at run time

// Bytes of scratch that an attention piece needs, the same for every instruction set.
inline int64_t attention_scratch_bytes(int64_t head_dim) {
  int64_t padded = (head_dim + 31) / 32 * 32;
  int64_t keys = kKvTile * padded * 4, values = keys, queries = kAttentionLanes * padded * 4;
  int64_t widened = 2 * keys + 2 * kKvTile * 4;
  int64_t sums = queries, tile = kLanesAtOnce * padded * 4, scores = kLanesAtOnce * kKvTile * 4, weights = scores;
  return keys + values + widened + queries + sums + scores + weights + tile + 2 * kAttentionLanes * 4 + 4096;
}

constexpr int32_t kSampleBins = 4096;  // of the histogram that finds where top-k and top-p cut

inline int64_t sample_scratch_bytes(int64_t vocab) {
  return kSampleBins * 12 + vocab * 8 + (vocab / 16 + 1) * 4 + vocab * 4 + 64;
}

extern const KernelTable *table;  // the chosen one
extern const KernelTable kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx;

}  // namespace penstock
