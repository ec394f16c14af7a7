// The operators, for the CPU alone. Python makes the tensors of results and checks all arguments.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "attention.h"
#include "norm_rope.h"

namespace hf_qknorm {
namespace {

using at::Tensor;

Heads heads_of(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

Problem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& ranges,
                   const std::optional<Tensor>& sinks, const std::optional<Tensor>& seed, double scale,
                   std::optional<double> cap, bool causal, std::optional<int64_t> window, double dropout) {
  Problem problem{q.scalar_type(), heads_of(q), heads_of(k), heads_of(v)};
  problem.batch = q.size(0), problem.heads = q.size(1), problem.queries = q.size(2), problem.head_dim = q.size(3);
  problem.key_heads = k.size(1), problem.keys = k.size(2);
  problem.ranges = ranges ? ranges->const_data_ptr<int32_t>() : nullptr;
  problem.ranges_batch = ranges && ranges->size(0) > 1 ? ranges->stride(0) : 0;
  problem.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  problem.scale = scale, problem.cap = cap, problem.causal = causal, problem.window = window;
  problem.dropout = seed ? dropout : 0.0;
  problem.seed = seed ? static_cast<uint64_t>(*seed->const_data_ptr<int64_t>()) : 0;
  return problem;
}

void run_forward(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& ranges,
                 const std::optional<Tensor>& sinks, const std::optional<Tensor>& seed, double scale,
                 std::optional<double> cap, bool causal, std::optional<int64_t> window, double dropout, Tensor out,
                 Tensor normaliser) {
  forward(problem_of(q, k, v, ranges, sinks, seed, scale, cap, causal, window, dropout), heads_of(out),
          normaliser.data_ptr<float>());
}

void run_backward(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& ranges,
                  const std::optional<Tensor>& sinks, const std::optional<Tensor>& seed, double scale,
                  std::optional<double> cap, bool causal, std::optional<int64_t> window, double dropout,
                  const Tensor& grad, const Tensor& out, const Tensor& normaliser, Tensor dq, Tensor dk, Tensor dv,
                  Tensor delta) {
  backward(problem_of(q, k, v, ranges, sinks, seed, scale, cap, causal, window, dropout),
           {heads_of(grad), heads_of(out), normaliser.const_data_ptr<float>(), dq.data_ptr<float>(), dq.size(0),
            heads_of(dk), heads_of(dv), delta.data_ptr<float>()});
}

Tensor run_norm_rope(const Tensor& x, bool normed, bool centred, bool summed, const std::optional<Tensor>& gain,
                     const std::optional<Tensor>& bias, double eps, const std::optional<Tensor>& cos,
                     const std::optional<Tensor>& sin, bool interleaved) {
  return norm_rope(x, {normed, centred, summed, eps}, gain, bias, cos, sin, interleaved);
}

#define HF_QKNORM_CALL                                                                                 \
  "Tensor q, Tensor k, Tensor v, Tensor? ranges, Tensor? sinks, Tensor? seed, float scale, float? cap, " \
  "bool causal, int? window, float dropout, "

TORCH_LIBRARY(HF_QKNORM_LIBRARY, library) {
  library.def("forward(" HF_QKNORM_CALL "Tensor(a!) out, Tensor(b!) normaliser) -> ()");
  library.def("backward(" HF_QKNORM_CALL
              "Tensor grad, Tensor out, Tensor normaliser, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
              "Tensor(d!) delta) -> ()");
  library.def(
      "norm_rope(Tensor x, bool normed, bool centred, bool summed, Tensor? gain, Tensor? bias, float eps, Tensor? cos, "
      "Tensor? sin, bool interleaved) -> Tensor");
}

TORCH_LIBRARY_IMPL(HF_QKNORM_LIBRARY, CPU, library) {
  library.impl("forward", run_forward);
  library.impl("backward", run_backward);
  library.impl("norm_rope", run_norm_rope);
}

}  // namespace
}  // namespace hf_qknorm
