// ggml's own product of a weight with rows of floats, as llama.cpp computes it: microseconds of CPU time on one thread.
// Usage: ggml_products TYPE N K ROWS COPIES ROUNDS; TYPE is f16, q8_0 or q4_0. The least of the rounds is printed;
// weights rotate through COPIES of themselves, so that they come from where a model's would.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "ggml-cpu.h"
#include "ggml.h"

static double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
  if (argc != 7) return 2;
  ggml_type type = !strcmp(argv[1], "f16") ? GGML_TYPE_F16 : !strcmp(argv[1], "q8_0") ? GGML_TYPE_Q8_0 : GGML_TYPE_Q4_0;
  int64_t n = atoll(argv[2]), k = atoll(argv[3]), rows = atoll(argv[4]), copies = atoll(argv[5]), rounds = atoll(argv[6]);
  size_t weight = ggml_row_size(type, k) * (size_t)n;
  ggml_init_params params = {(weight + 4096) * (size_t)copies + ((size_t)(rows * (n + k)) * 8 + (1 << 20)) * (size_t)copies,
                             nullptr, false};
  ggml_context *context = ggml_init(params);
  std::vector<float> values((size_t)(n * k));
  for (size_t i = 0; i < values.size(); i++) values[i] = (float)(i * 2654435761u % 2001) / 1000.0f - 1.0f;
  ggml_tensor *x = ggml_new_tensor_2d(context, GGML_TYPE_F32, k, rows);
  memcpy(x->data, values.data(), sizeof(float) * (size_t)(rows * k));
  std::vector<ggml_cgraph *> graphs;
  ggml_tensor *first = nullptr, *out = nullptr;
  for (int64_t i = 0; i < copies; i++) {
    ggml_tensor *w = ggml_new_tensor_2d(context, type, k, n);
    if (first)
      memcpy(w->data, first->data, weight);
    else
      ggml_quantize_chunk(type, values.data(), (first = w)->data, 0, n, k, nullptr);
    ggml_cgraph *graph = ggml_new_graph_custom(context, 8, false);
    ggml_tensor *y = ggml_mul_mat(context, w, x);
    y->data = (out = out ? out : y)->data;  // One buffer for all, as ours have and as a model's allocator gives.
    ggml_build_forward_expand(graph, y);
    graphs.push_back(graph);
  }
  std::vector<uint8_t> work;
  double least = 1e9;
  for (int64_t round = 0; round <= rounds; round++) {
    double begun = cpu_seconds();
    for (ggml_cgraph *graph : graphs) {
      ggml_cplan plan = ggml_graph_plan(graph, 1, nullptr);
      if (work.size() < plan.work_size) work.resize(plan.work_size);
      plan.work_data = work.data();
      ggml_graph_compute(graph, &plan);
    }
    double taken = (cpu_seconds() - begun) / (double)copies;
    if (round && taken < least) least = taken;
  }
  printf("%.3f\n", least * 1e6);
}
