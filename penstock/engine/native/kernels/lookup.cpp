// Prompt lookup: a row is guessed to go on as it did where its last tokens stood before; see engine/speculation.py.

#include "ops.h"

namespace penstock {
namespace {

// How many tokens up to `end` (it included) are those up to the last, at most `most`.
int64_t common(const int32_t *tokens, int64_t end, int64_t last, int64_t most) {
  int64_t length = 0;
  while (length < most && length <= end && tokens[end - length] == tokens[last - length]) length++;
  return length;
}

}  // namespace

void lookup(const PsLookup *job) {
  for (int64_t i = 0; i < job->num_rows; i++) {
    int32_t *tokens = job->token_ids + job->rows[i] * job->ld_tokens;
    int64_t known = job->known[i], last = known - 1, longest = job->match_min[job->rows[i]] - 1, first = 0;
    for (int64_t end = last - 1; end >= 0 && longest < job->match_max; end--) {
      if (tokens[end] != tokens[last]) continue;
      int64_t length = common(tokens, end, last, job->match_max);
      if (length > longest) longest = length, first = end + 1;
    }
    job->found[i] = first ? job->most[i] : 0;
    // Where the run goes on into the guesses themselves, it is a period.
    for (int64_t j = 0; j < job->found[i]; j++) tokens[known + j] = tokens[first + j];
  }
}

}  // namespace penstock
