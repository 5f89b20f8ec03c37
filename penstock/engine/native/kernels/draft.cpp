// A model guesses how rows go on: several of its steps in one call, each drawing what the next one reads; see
// engine/draft_model.py.

#include "ops.h"

namespace penstock {
namespace {

struct Buffers {
  int64_t *token_ids, *samples, *drawn;
  int32_t *starts, *context;
};
Arena kept;

int64_t num_tokens(const PsDraft *job) {
  int64_t total = 0;
  for (int64_t i = 0; i < job->num_rows; i++) total += job->counts[i];
  return total;
}

bool place(const PsDraft *job, Buffers *out) {
  int64_t rows = job->num_rows, t = num_tokens(job);
  if (!kept.reserve(8 * (t + 2 * rows) + 4 * (2 * rows + 1))) return false;
  int64_t *at = (int64_t *)kept.at;
  *out = {at, at + t, at + t + rows, (int32_t *)(at + t + 2 * rows), (int32_t *)(at + t + 2 * rows) + rows + 1};
  return true;
}

// Rows that want more than `pass` guesses. They come first.
int64_t num_active(const PsDraft *job, int64_t pass) {
  int64_t rows = 0;
  while (rows < job->num_rows && job->most[rows] > pass) rows++;
  return rows;
}

// The known tokens that are not computed yet; a token that only the other model has is any token of this one.
void lay_out_known(const PsDecoder *d, const PsDraft *job, const Buffers &to) {
  int64_t t = 0;
  to.starts[0] = 0;
  for (int64_t i = 0; i < job->num_rows; i++) {
    const int32_t *tokens = job->token_ids + job->rows[i] * job->ld_tokens;
    for (int64_t j = 0; j < job->counts[i]; j++) {
      int32_t token = tokens[job->firsts[i] + j];
      to.token_ids[t++] = token < d->vocab ? token : 0;
    }
    to.starts[i + 1] = (int32_t)t;
    to.samples[i] = t - 1;
    to.context[i] = (int32_t)(job->firsts[i] + job->counts[i]);
  }
}

}  // namespace

int32_t draft(const PsDecoder *d, const PsDraft *job) {
  Buffers at;
  if (!place(job, &at)) return -1;
  lay_out_known(d, job, at);
  int64_t active = num_active(job, 0), t = at.starts[job->num_rows], rows = job->num_rows;
  for (int64_t pass = 0; rows; pass++) {
    PsStep pass_step = {at.token_ids, at.samples, job->block_tables, at.starts, at.context, job->logits, nullptr,
                        t,            rows,       job->ld_tables,    active,    nullptr};
    if (int32_t failed = step(d, &pass_step)) return failed;
    PsSample draw = job->draw;
    draw.logits = job->logits, draw.token_ids = at.drawn, draw.rows = active, draw.ld_logits = d->vocab;
    if (draw.keys) draw.keys += pass * job->num_rows * 2;
    if (active && sample(&draw)) return -1;
    rows = num_active(job, pass + 1);
    for (int64_t i = 0; i < active; i++) {
      int64_t known = job->firsts[i] + job->counts[i], token = at.drawn[i] < 0 ? 0 : at.drawn[i];
      job->token_ids[job->rows[i] * job->ld_tokens + known + pass] = (int32_t)token;
      at.token_ids[i] = token, at.samples[i] = i;
      at.starts[i + 1] = (int32_t)(i + 1), at.context[i] = (int32_t)(known + pass + 1);
    }
    active = t = rows;
  }
  return 0;
}

}  // namespace penstock
