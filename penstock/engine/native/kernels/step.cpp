// A whole decoder step in one call: at batch 1 a small model spends more time between operations than in them.
#include "adapters.h"
#include "experts.h"
#include "ops.h"

#include <string.h>

namespace penstock {
namespace {

// Activations of a step; `wide` holds qkv, later the MLP's inside; `delta` what a sublayer gives, where that is normed;
// `experts` what a mixture of them needs.
struct Buffers {
  char *residual, *normed, *delta, *wide, *q, *attended, *picked, *experts;
  int64_t *positions, *slots;
};
Arena activations;

struct Sizes {
  int64_t element, hidden, q, qkv, wide;
  bool delta;  // sublayers give theirs before it is added

  explicit Sizes(const PsDecoder *d)
      : element(d->cache.type == PS_BF16 ? 2 : 4),
        hidden(d->hidden),
        q(d->num_q_heads * d->cache.head_dim),
        qkv(q + 2 * d->cache.num_kv_heads * d->cache.head_dim),
        wide(qkv > d->intermediate ? qkv : d->intermediate),
        delta(d->layers[0].attention_out_norm != nullptr) {}
};

bool place(const PsDecoder *d, const Sizes &sizes, const PsStep *step, Buffers *out) {
  int64_t row = sizes.element, t = step->t, total = 0;
  auto take = [&total](int64_t bytes) {
    int64_t at = total;
    total += (bytes + 63) / 64 * 64;
    return at;
  };
  int64_t experts = d->top_k ? experts_scratch_bytes(&d->layers[0].router, d->top_k, t, row) : 0;
  int64_t residual = take(t * sizes.hidden * row), normed = take(t * sizes.hidden * row),
          delta = take(sizes.delta ? t * sizes.hidden * row : 0), wide = take(t * sizes.wide * row), q = take(t * sizes.q * row), attended = take(t * sizes.q * row),
          picked = take(step->num_samples * sizes.hidden * row), positions = take(t * 8), slots = take(t * 8), mixture = take(experts);
  if (!activations.reserve(total)) return false;
  char *at = activations.at;
  *out = {at + residual, at + normed, at + delta,   at + wide,                   at + q,
          at + attended, at + picked, at + mixture, (int64_t *)(at + positions), (int64_t *)(at + slots)};
  return true;
}

// Positions and cache slots of every token. False if a table names what is not there.
bool locate(const PsDecoder *d, const PsStep *step, const Buffers &buffers) {
  int64_t size = d->cache.block_size;
  if (step->query_starts[0] != 0 || step->query_starts[step->rows] != step->t) return false;
  for (int64_t row = 0; row < step->rows; row++) {
    int64_t first = step->query_starts[row], count = step->query_starts[row + 1] - first,
            context = step->context_lens[row];
    const int32_t *table = step->block_tables + row * step->ld_tables;
    if (count < 0 || context < count || context > d->num_positions || (context + size - 1) / size > step->ld_tables)
      return false;
    for (int64_t block = 0; block * size < context; block++)
      if (table[block] < 0 || table[block] >= d->num_blocks) return false;
    for (int64_t i = 0; i < count; i++) {
      int64_t position = context - count + i;
      buffers.positions[first + i] = position;
      buffers.slots[first + i] = table[position / size] * size + position % size;
    }
  }
  for (int64_t i = 0; i < step->t; i++)
    if (step->token_ids[i] < 0 || step->token_ids[i] >= d->vocab) return false;
  for (int64_t i = 0; i < step->num_samples; i++)
    if (step->samples[i] < 0 || step->samples[i] >= step->t) return false;
  return true;
}

// Row `token` of a packed [vocab, hidden] weight; see pack.cpp for where its elements lie.
void unpack_row(const PsWeight *w, int64_t token, char *out) {
  int64_t panel = token / 32, half = token % 32 / 16, column = token % 16;
  if (w->type == PS_F32) {
    const float *from = (const float *)w->data + panel * w->k_padded * 32 + token % 32;
    for (int64_t k = 0; k < w->k; k++) memcpy(out + 4 * k, from + k * 32, 4);
    return;
  }
  const uint16_t *from = (const uint16_t *)w->data + panel * w->k_padded * 32 + half * 512 + column * 2;
  for (int64_t k = 0; k < w->k; k += 2) memcpy(out + 2 * k, from + k / 32 * 1024 + k % 32 * 16, k + 1 < w->k ? 4 : 2);
}

void embed(const PsDecoder *d, const PsStep *step, const Sizes &sizes, char *out) {
  int64_t bytes = sizes.hidden * sizes.element;
  for (int64_t i = 0; i < step->t; i++, out += bytes) {
    if (d->embedding)
      memcpy(out, (const char *)d->embedding + step->token_ids[i] * bytes, (size_t)bytes);
    else
      unpack_row(&d->head, step->token_ids[i], out);
  }
  int64_t values = step->t * sizes.hidden;
  if (d->embedding_scale != 1.0f)
    scale_values(out - values * sizes.element, d->cache.type, values, d->embedding_scale);
}

struct Run {
  const PsDecoder *d;
  const PsStep *step;
  Sizes sizes;
  Buffers buffers;
  Stopwatch watch;
  const StepAdapters *adapters;
  int64_t index;  // of the layer

  int32_t norm(const void *x, const float *weight, void *y, int64_t m, bool add = false) const {
    PsNorm job = {x, nullptr, weight, y, m, sizes.hidden, sizes.hidden, 0, sizes.hidden, d->eps, d->cache.type, add, 0};
    return rms_norm(&job);
  }

  int32_t multiply(AdaptedLinear which, const PsWeight *w, const void *x, void *y, bool add) const {
    PsLinear job = {w, x, y, add ? y : nullptr, step->t, w->k, w->n, w->n, d->cache.type, d->cache.type};
    return adapters->linear(&job, index, which);
  }

  // A sublayer's last product, added to the residual; normed before, if it has a norm.
  int32_t join(PsPart part, const PsWeight *w, const void *x, const float *out_norm) {
    AdaptedLinear which = part == PS_PART_O ? kAdaptedO : kAdaptedDown;
    if (!out_norm) return watch.lap(part, multiply(which, w, x, buffers.residual, true));
    int32_t failed = watch.lap(part, multiply(which, w, x, buffers.delta, false));
    return failed | watch.lap(PS_PART_NORM, norm(buffers.delta, out_norm, buffers.residual, step->t, true));
  }

  int32_t feed_forward(const PsLayer *l) {
    if (!d->top_k) {
      int32_t failed = watch.lap(PS_PART_GATE_UP, multiply(kAdaptedGateUp, &l->mlp->gate_up, buffers.normed, buffers.wide, false));
      return failed | join(PS_PART_DOWN, &l->mlp->down, buffers.wide, l->mlp_out_norm);
    }
    bool add = !l->mlp_out_norm;
    ExpertsJob job = {&l->router,      l->mlp,  buffers.normed, add ? buffers.residual : buffers.delta,
                      buffers.wide,    buffers.experts, step->t, d->cache.type, d->top_k, d->normalise != 0, add};
    int32_t failed = experts(&job, &watch);
    if (add) return failed;
    return failed | watch.lap(PS_PART_NORM, norm(buffers.delta, l->mlp_out_norm, buffers.residual, step->t, true));
  }

  int32_t layer(int64_t at) {
    index = at;
    const PsLayer *l = d->layers + index;
    PsKvCache cache = d->cache;
    cache.base = (char *)cache.base + index * d->layer_stride * (cache.rounded ? 1 : sizes.element);
    PsRopeWrite rope = {buffers.wide,      buffers.q,     l->q_norm, l->k_norm, l->cos,    l->sin,
                        buffers.positions, buffers.slots, cache,     step->t,   sizes.qkv, sizes.q,
                        d->num_q_heads,    l->rotary_dim, d->eps,    0};
    PsAttention attend = {buffers.q,
                          buffers.attended,
                          step->block_tables,
                          step->query_starts,
                          step->context_lens,
                          cache,
                          step->rows,
                          step->ld_tables,
                          sizes.q,
                          sizes.q,
                          d->num_q_heads,
                          l->window,
                          d->scale,
                          d->softcap};
    int32_t failed = watch.lap(PS_PART_NORM, norm(buffers.residual, l->input_norm, buffers.normed, step->t));
    failed |= watch.lap(PS_PART_QKV, multiply(kAdaptedQkv, &l->qkv, buffers.normed, buffers.wide, false));
    failed |= watch.lap(PS_PART_ROPE, rope_write(&rope));
    failed |= watch.lap(PS_PART_ATTENTION, attention(&attend));
    failed |= join(PS_PART_O, &l->o, buffers.attended, l->attention_out_norm);
    failed |= watch.lap(PS_PART_NORM, norm(buffers.residual, l->post_attention_norm, buffers.normed, step->t));
    return failed | feed_forward(l);
  }

  int32_t widen_picked() {
    int64_t values = step->num_samples * sizes.hidden;
    if (sizes.element == 4) {
      memcpy(step->logits, buffers.picked, (size_t)(values * 4));
      return 0;
    }
    for (int64_t i = 0; i < values; i++) {
      uint32_t bits = (uint32_t)((const uint16_t *)buffers.picked)[i] << 16;
      memcpy(step->logits + i, &bits, 4);
    }
    return 0;
  }

  int32_t logits() {
    int64_t bytes = sizes.hidden * sizes.element;
    if (step->states && norm(buffers.residual, d->final_norm, step->states, step->t)) return -1;
    if (!step->num_samples) return 0;
    for (int64_t i = 0; i < step->num_samples; i++) {
      if (norm(buffers.residual + step->samples[i] * bytes, d->final_norm, buffers.picked + i * bytes, 1)) return -1;
    }
    if (!d->head.n) return watch.lap(PS_PART_NORM, widen_picked());
    PsLinear job = {&d->head, buffers.picked, step->logits, nullptr, step->num_samples, sizes.hidden, d->head.n,
                    0,        d->cache.type,  PS_F32};
    watch.lap(PS_PART_NORM, 0);
    int32_t failed = linear(&job);
    if (d->logit_softcap > 0) cap_values(step->logits, step->num_samples * d->head.n, d->logit_softcap);
    return watch.lap(PS_PART_HEAD, failed);
  }
};

}  // namespace

int32_t step(const PsDecoder *d, const PsStep *job) {
  StepAdapters adapters;
  Run run = {d, job, Sizes(d), {}, Stopwatch(job->part_ns), &adapters, 0};
  if (!place(d, run.sizes, job, &run.buffers)) return -1;
  if (!locate(d, job, run.buffers)) return -2;
  if (!adapters.prepare(job, d->num_layers)) return -1;
  embed(d, job, run.sizes, run.buffers.residual);
  run.watch.lap(PS_PART_REST, 0);
  for (int64_t i = 0; i < d->num_layers; i++)
    if (run.layer(i)) return -1;
  return run.logits();
}

}  // namespace penstock
