// The two products of an adapter on vectors: inner = scale * x A^T, then delta = inner B^T. Every sum is one chain in
// the order of its terms, so a token's bits never depend on the tokens beside it.
#pragma once
#include "table.h"
#include "vec.h"

namespace {

using penstock::AdapterPiece;

// R tokens by J ranks; `x` are the tokens' inputs.
template <class T, int R, int J>
static inline void shrink_block(const AdapterPiece *piece, const T *const *x, int64_t token, int64_t rank) {
  const PsAdapterPart *part = piece->part;
  int64_t k = part->k, whole = k / 16 * 16;
  const T *a = (const T *)part->a + rank * k;
  F16 acc[R][J];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < J; j++) acc[r][j] = zero();
  for (int64_t i = 0; i < whole; i += 16) {
    F16 w[J];
    for (int j = 0; j < J; j++) w[j] = load_as_float(a + j * k + i);
    for (int r = 0; r < R; r++) {
      F16 v = load_as_float(x[r] + i);
      for (int j = 0; j < J; j++) acc[r][j] = fma(v, w[j], acc[r][j]);
    }
  }
  if (whole < k)
    for (int r = 0; r < R; r++)
      for (int j = 0; j < J; j++)
        acc[r][j] = fma(load_tail(x[r] + whole, k - whole), load_tail(a + j * k + whole, k - whole), acc[r][j]);
  for (int r = 0; r < R; r++)
    for (int j = 0; j < J; j++)
      piece->inner[(token + r) * piece->ld_inner + rank + j] = sum_lanes(acc[r][j]) * part->scale;
}

template <class T, int R>
static inline void shrink_tokens(const AdapterPiece *piece, int64_t token, int64_t first, int64_t last) {
  const T *x[R];
  for (int r = 0; r < R; r++) x[r] = (const T *)(piece->x + piece->tokens[token + r] * piece->row_bytes);
  int64_t rank = first;
  for (; rank + 4 <= last; rank += 4) shrink_block<T, R, 4>(piece, x, token, rank);
  for (; rank < last; rank++) shrink_block<T, R, 1>(piece, x, token, rank);
}

template <class T>
static void shrink_typed(const AdapterPiece *piece, int64_t first, int64_t last) {
  int64_t token = 0;
  for (; token + 4 <= piece->count; token += 4) shrink_tokens<T, 4>(piece, token, first, last);
  for (; token + 2 <= piece->count; token += 2) shrink_tokens<T, 2>(piece, token, first, last);
  for (; token < piece->count; token++) shrink_tokens<T, 1>(piece, token, first, last);
}

static void adapter_shrink(const AdapterPiece *piece, int64_t first, int64_t last) {
  if (piece->type == PS_BF16)
    shrink_typed<bf16>(piece, first, last);
  else
    shrink_typed<float>(piece, first, last);
}

// R tokens by G groups of 16 outputs.
template <class T, int R, int G>
static inline void expand_block(const AdapterPiece *piece, int64_t token, int64_t group) {
  const PsAdapterPart *part = piece->part;
  int64_t rank = part->rank;
  const T *b = (const T *)part->b + group * rank * 16;
  const float *inner = piece->inner + token * piece->ld_inner;
  F16 acc[R][G];
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) acc[r][g] = zero();
  for (int64_t j = 0; j < rank; j++) {
    F16 w[G];
    for (int g = 0; g < G; g++) w[g] = load_as_float(b + (g * rank + j) * 16);
    for (int r = 0; r < R; r++) {
      F16 v = set1(inner[r * piece->ld_inner + j]);
      for (int g = 0; g < G; g++) acc[r][g] = fma(v, w[g], acc[r][g]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++)
      store(piece->delta + (token + r) * piece->ld_delta + (part->first + (group + g) * part->stride) * 16, acc[r][g]);
}

template <class T, int R>
static inline void expand_tokens(const AdapterPiece *piece, int64_t token, int64_t first, int64_t last) {
  int64_t group = first;
  for (; group + 4 <= last; group += 4) expand_block<T, R, 4>(piece, token, group);
  for (; group < last; group++) expand_block<T, R, 1>(piece, token, group);
}

template <class T>
static void expand_typed(const AdapterPiece *piece, int64_t first, int64_t last) {
  int64_t token = 0;
  for (; token + 4 <= piece->count; token += 4) expand_tokens<T, 4>(piece, token, first, last);
  for (; token + 2 <= piece->count; token += 2) expand_tokens<T, 2>(piece, token, first, last);
  for (; token < piece->count; token++) expand_tokens<T, 1>(piece, token, first, last);
}

static void adapter_expand(const AdapterPiece *piece, int64_t first, int64_t last) {
  if (piece->type == PS_BF16)
    expand_typed<bf16>(piece, first, last);
  else
    expand_typed<float>(piece, first, last);
}

}  // namespace
