// The C ABI of Penstock's CPU kernels. Mirrored field by field in library.py; bump PS_ABI_VERSION when it changes.
//
// Nothing here knows of torch or Python. Callers own every buffer; shapes are checked before the call (in Python).
// Strides are in elements. Unless said otherwise matrices are row-major with unit inner stride.
#pragma once
#include <stdint.h>

#define PS_ABI_VERSION 18
#define PS_EXPORT extern "C" __attribute__((visibility("default")))

enum PsType : int32_t { PS_F32 = 0, PS_BF16 = 1, PS_I8 = 2, PS_I4 = 3 };
enum PsPart : int32_t {  // of a step, for PsStep::part_ns
  PS_PART_NORM,
  PS_PART_QKV,
  PS_PART_ROPE,
  PS_PART_ATTENTION,
  PS_PART_O,
  PS_PART_GATE_UP,
  PS_PART_DOWN,
  PS_PART_HEAD,
  PS_PART_REST,
  PS_NUM_PARTS
};
enum PsEpilogue : int32_t { PS_PLAIN = 0, PS_SILU_MUL = 1, PS_GELU_MUL = 2 };  // GELU in its tanh approximation

// A packed weight: W [n, k], stored in panels of 32 output columns (see pack.cpp for the byte order).
struct PsWeight {
  const void *data;     // 64-byte aligned
  const float *scale;   // I8: [n_padded]; I4: [panels][groups][32]; else null
  const float *bias;    // [n_padded] in panel order, or null
  const float *offset;  // I4: like scale, or null: symmetric
  const int32_t *sums;  // I8: column sums [n_padded]; else null
  const int32_t *order; // I4: input order[i] meets column i, k a multiple of the group; or null: input i
  int64_t n, k;         // logical outputs and inputs
  int64_t k_padded;     // k rounded up to the type's step
  int64_t panels;       // panels of 32 columns
  int32_t type;         // PsType
  int32_t
      epilogue;  // PsEpilogue: with a gate a panel is 16 gate columns, then their 16 up columns, and gives 16 outputs
  int32_t group;  // I4: inputs per scale
  int32_t reserved;
};

// A weight to be packed.
struct PsPack {
  const void *first, *second;  // [n, k], dense, I4 as one value from 0 to 15 to a byte; `second` of a gate and up, or null
  void *out;
  int64_t n, k, k_padded;
  int32_t type;  // PsType
  int32_t reserved;
};

struct PsLinear {
  const PsWeight *weight;
  const void *x;         // [m, k], type x_type
  void *y;               // [m, n], type y_type
  const void *residual;  // [m, n] of y_type, added before rounding; or null
  int64_t m, ldx, ldy, ldr;
  int32_t x_type, y_type;
};

struct PsNorm {
  const void *x;        // [m, n]
  void *residual;       // [m, n] or null: residual += x first, and the sum is what gets normalized
  const float *weight;  // [n]
  void *y;              // [m, n]
  int64_t m, n, ldx, ldr, ldy;
  float eps;
  int32_t type;
  int32_t add;  // 1: the result is added to y, rounded once
  int32_t reserved;
};

struct PsSiluMul {
  const void *x;  // [m, 2n]: gate, then up
  void *y;        // [m, n]
  int64_t m, n, ldx, ldy;
  int32_t type, reserved;
};

// One layer of the paged KV cache: element (block, k or v, slot, head, dim) lies at
// base + block * block_stride + kv * kv_stride + slot * num_kv_heads * head_dim + head * head_dim + dim.
// A rounded cache holds a head of a token as head_dim bytes and the float that they are to be multiplied by; its
// elements are bytes, and head_dim + 4 of them stand where head_dim does above.
struct PsKvCache {
  void *base;
  int64_t block_stride, kv_stride;
  int32_t block_size, num_kv_heads, head_dim;
  int32_t type;  // of queries and outputs, and of what is stored unless that is rounded
  int32_t rounded, reserved;
};

struct PsRopeWrite {
  const void *qkv;           // [t, (num_q_heads + 2 num_kv_heads) * head_dim], the cache's type
  void *q;                   // [t, num_q_heads * head_dim]
  const float *q_norm;       // [head_dim] or null
  const float *k_norm;       // [head_dim] or null
  const float *cos, *sin;    // [num_positions, rotary_dim / 2]
  const int64_t *positions;  // [t]
  const int64_t *slots;      // [t]: block * block_size + slot, or -1 to store nothing
  PsKvCache cache;
  int64_t t, ld_qkv, ld_q;
  int32_t num_q_heads, rotary_dim;
  float eps;
  int32_t reserved;
};

struct PsAttention {
  const void *q;                // [t, num_q_heads * head_dim]
  void *out;                    // [t, num_q_heads * head_dim]
  const int32_t *block_tables;  // [rows, ld_tables]
  const int32_t *query_starts;  // [rows + 1]
  const int32_t *context_lens;  // [rows], the row's tokens including this chunk
  PsKvCache cache;
  int64_t rows, ld_tables, ld_q, ld_out;
  int32_t num_q_heads;
  int32_t window;        // a query sees the last `window` positions including its own; 0: all
  float scale, softcap;  // softcap 0: none
};

// A gated feed-forward layer: down(act(gate) * up), the gate being gate_up's epilogue.
struct PsMlp {
  PsWeight gate_up, down;
};

// One pre-norm block: norm, qkv, (head norms) RoPE, attention, o, (norm) +, norm, feed-forward, (norm) +.
struct PsLayer {
  PsWeight qkv, o;
  PsWeight router;   // [experts, hidden], where there are several
  const PsMlp *mlp;  // one, or the experts
  const float *input_norm, *post_attention_norm;  // [hidden]
  const float *attention_out_norm, *mlp_out_norm;  // [hidden], of what a sublayer gives before it is added; or null
  const float *q_norm, *k_norm;                   // [head_dim] or null
  const float *cos, *sin;                         // [num_positions, rotary_dim / 2]
  int32_t window, rotary_dim;                     // see PsAttention and PsRopeWrite
};

struct PsDecoder {
  const PsLayer *layers;
  const void *embedding;    // [vocab, hidden] of `cache.type`, or null: rows are read out of the packed head
  const float *final_norm;  // [hidden]
  PsWeight head;            // [vocab, hidden]; without outputs: hidden states are wanted, and no logits
  PsKvCache cache;          // of layer 0
  int64_t layer_stride;     // from one layer's cache to the next
  int64_t num_layers, hidden, intermediate, num_blocks, num_positions;
  int32_t num_q_heads;
  float eps, scale, softcap;  // of norms and attention
  float embedding_scale;      // factor of embeddings
  float logit_softcap;        // logits become cap * tanh(logits / cap); 0: they stay
  int32_t top_k;              // experts of each token; 0: a layer has one feed-forward network
  int32_t normalise;          // the chosen experts' shares are scaled to sum to one
  int32_t vocab;              // rows of the embedding
};

#define PS_ADAPTER_RANK_MAX 128

// A low-rank addition to some of a linear's outputs: x A^T, scaled and rounded to the activations' type, then B^T.
// Types are those of the activations; `s` is 2 for bf16, whose products come in pairs, and 1 for float.
struct PsAdapterPart {
  const void *b;          // [groups][rank / s][16][s]: outputs in groups of 16, the last one filled up with zeros
  int64_t from, rank;     // its ranks among the linear's; both multiples of s, filled up with zeros
  int64_t groups;
  int64_t first, stride;  // the group of the linear's sums, in the order of panels, that the first one is added to,
                          // and from each to the next
};

struct PsAdapterLinear {
  const void *a;               // [panels][k / s, rounded up][16][s]: the ranks of all parts, in panels of 16
  const float *scale;          // [panels][16]
  const PsAdapterPart *parts;  // of outputs that do not overlap, three at most
  int64_t num_parts, panels, k;
};

// What an adapter adds to one layer.
struct PsAdapterLayer {
  PsAdapterLinear qkv, o, gate_up, down;
};

// Rows as in PsAttention; slots and positions follow from the tables.
struct PsStep {
  const int64_t *token_ids;  // [t]
  const int64_t *samples;    // [num_samples] tokens whose logits are wanted
  const int32_t *block_tables, *query_starts, *context_lens;
  float *logits;     // [num_samples, vocab], or [num_samples, hidden] of a model without a head
  int64_t *part_ns;  // [PS_NUM_PARTS] nanoseconds are added to, or null
  int64_t t, rows, ld_tables, num_samples;
  const PsAdapterLayer *const *adapters;  // [rows] each row's [num_layers], or null; null: no row has one
  void *states;  // [t, hidden] out, of the cache's type: what the head would read, of every token; null: unwanted
};

// Draws one token from every row of logits; see engine/sampler.py for what it means.
struct PsSample {
  const float *logits;       // [rows, vocab]
  const float *temperature;  // [rows]; below `greedy_below`: the likeliest token
  const int64_t *top_k;      // [rows], 0: off
  const double *top_p;       // [rows], 1: off
  const float *min_p_bound;  // [rows], log of min-p: scaled logits below are dropped
  const int32_t *keys;       // [rows, 2] of the counter-based randomness
  const uint32_t *masks;     // [.., ld_masks]: bit t is set where token t may be drawn; null: all may
  const int32_t *mask_rows;  // [rows] rows of `masks`; -1: all may
  int64_t *token_ids;        // [rows] out; -1 where the logits are not finite numbers
  int64_t rows, vocab, ld_logits, ld_masks;
  float greedy_below;
  int32_t reserved;
};

// Guesses how rows go on: as they did where their last tokens stood before; see engine/speculation.py.
struct PsLookup {
  int32_t *token_ids;    // [.., ld_tokens]; guesses are written behind the known tokens
  const int64_t *rows;   // [num_rows] rows of `token_ids`, each once
  const int64_t *known;  // [num_rows] tokens that are known, at least 1
  const int64_t *most;   // [num_rows] guesses that are wanted, and fit behind them
  const int64_t *match_min;  // by row of `token_ids`: so many of its last tokens must have stood before
  int64_t *found;        // [num_rows] out: how many there are
  int64_t num_rows, ld_tokens, match_max;
};

// Guesses how rows go on with a model of its own; see engine/draft_model.py. Rows that want the most come first.
struct PsDraft {
  int32_t *token_ids;           // [.., ld_tokens]; guesses are written behind the known tokens
  const int64_t *rows;          // [num_rows] rows of `token_ids`, each once
  const int64_t *firsts;        // [num_rows] known tokens before this one are computed
  const int64_t *counts;        // [num_rows] known tokens to compute from there, at least 1
  const int64_t *most;          // [num_rows] guesses, which fit behind; 0 where known tokens are left to compute
  const int32_t *block_tables;  // [num_rows, ld_tables]
  float *logits;                // [num_rows, vocab] scratch
  PsSample draw;                // how the rows draw, all but logits and token_ids; `keys` [guesses][num_rows, 2]
  int64_t num_rows, ld_tokens, ld_tables;
};

PS_EXPORT int32_t ps_abi_version(void);
PS_EXPORT int64_t
ps_struct_bytes(int32_t index);  // size of the index-th struct of this file, for the other side to check
PS_EXPORT const char *ps_init(
    const char *isa);  // best ISA, or the named one; returns its name or null. Once per process.
PS_EXPORT int32_t ps_set_threads(int32_t num_threads, int32_t spin_us, int32_t pin);
PS_EXPORT int32_t ps_supports(int32_t weight_type);

// Asks for huge pages under memory of the caller's, touched or not; a wish that may be refused.
PS_EXPORT void ps_advise_huge(void *at, int64_t bytes);
PS_EXPORT void ps_pack(const PsPack *jobs, int64_t count);

// Rounds W [n, k] of `x_type` (rows ldx apart) to int8, or to four-bit values of a byte each; `scale` [n] or [n, groups].
PS_EXPORT void ps_round(int32_t type, int32_t x_type, const void *x, int64_t n, int64_t k, int64_t ldx, int64_t group,
                        void *values, float *scale);

// Each returns 0, or -1 when scratch memory could not be had, or (ps_step, ps_draft) -2 when a table points outside of its
// buffer.
PS_EXPORT int32_t ps_linear(const PsLinear *job);
PS_EXPORT int32_t ps_rms_norm(const PsNorm *job);
PS_EXPORT int32_t ps_silu_mul(const PsSiluMul *job);
PS_EXPORT int32_t ps_rope_write(const PsRopeWrite *job);
PS_EXPORT int32_t ps_attention(const PsAttention *job);
PS_EXPORT int32_t ps_sample(const PsSample *job);
PS_EXPORT int32_t ps_lookup(const PsLookup *job);
PS_EXPORT int32_t ps_step(const PsDecoder *decoder, const PsStep *step);
PS_EXPORT int32_t ps_draft(const PsDecoder *decoder, const PsDraft *job);
