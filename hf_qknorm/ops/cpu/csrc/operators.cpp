// The operators, for the CPU alone. Each checks its arguments before it reads them.
#include <torch/library.h>

#include "attention.h"
#include "checks.h"
#include "norm_rope.h"

namespace hf_qknorm {
namespace {

Tensor dense(const Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

Heads heads_of(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

// A problem, and the tensors that its pointers lead to.
struct Call {
  Tensor q, k, v;
  MaybeTensor ranges, sinks;
  Problem problem = {};

  Call(const Tensor& q_, const Tensor& k_, const Tensor& v_, const MaybeTensor& ranges_, const MaybeTensor& sinks_,
       const MaybeTensor& seed, double scale, std::optional<double> cap, bool causal, std::optional<int64_t> window,
       double dropout) {
    check_attention(q_, k_, v_, ranges_, sinks_, seed, scale, cap, causal, window, dropout);
    q = dense(q_), k = dense(k_), v = dense(v_);
    problem.dtype = q.scalar_type(), problem.q = heads_of(q), problem.k = heads_of(k), problem.v = heads_of(v);
    problem.batch = q.size(0), problem.heads = q.size(1), problem.queries = q.size(2), problem.head_dim = q.size(3);
    problem.key_heads = k.size(1), problem.keys = k.size(2);
    if (ranges_) {
      ranges = ranges_->contiguous();
      problem.ranges = ranges->const_data_ptr<int32_t>();
      problem.ranges_batch = ranges->size(0) > 1 ? ranges->stride(0) : 0;
    }
    if (sinks_) {
      sinks = sinks_->to(at::kFloat).contiguous();
      problem.sinks = sinks->const_data_ptr<float>();
    }
    problem.scale = scale, problem.cap = cap, problem.causal = causal, problem.dropout = dropout;
    // A longer window hides nothing either, and sums with it could overflow.
    if (window) problem.window = std::min(*window, problem.queries + problem.keys);
    if (dropout > 0) problem.seed = static_cast<uint64_t>(*seed->const_data_ptr<int64_t>());
  }
};

// Empty heads [B, H, T, D], laid out as [B, T, H, D]
Tensor laid_out(const Tensor& x) {
  return x.new_empty({x.size(0), x.size(2), x.size(1), x.size(3)}).transpose(1, 2);
}

// For gradients there is a normaliser.
std::tuple<Tensor, Tensor> run_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& ranges,
                                       const MaybeTensor& sinks, const MaybeTensor& seed, double scale,
                                       std::optional<double> cap, bool causal, std::optional<int64_t> window,
                                       double dropout, bool gradients) {
  const Call call(q, k, v, ranges, sinks, seed, scale, cap, causal, window, dropout);
  Tensor out = laid_out(q);
  Tensor normaliser = q.new_empty({q.size(0), q.size(1), gradients ? q.size(2) : 0, 2}, at::kFloat);
  if (gradients || !forward_few_rows(call.problem, heads_of(out)))
    forward(call.problem, heads_of(out), gradients ? normaliser.data_ptr<float>() : nullptr);
  return {out, normaliser};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> run_backward(
    const Tensor& grad, const Tensor& out, const Tensor& normaliser, const Tensor& q, const Tensor& k, const Tensor& v,
    const MaybeTensor& ranges, const MaybeTensor& sinks, const MaybeTensor& seed, double scale, std::optional<double> cap,
    bool causal, std::optional<int64_t> window, double dropout, bool, int64_t parts) {
  const Call call(q, k, v, ranges, sinks, seed, scale, cap, causal, window, dropout);
  check_gradients(q, grad, out, normaliser, parts);
  const Tensor dense_grad = dense(grad), dense_out = dense(out), pairs = normaliser.contiguous();
  Tensor dq = pairs.new_zeros({parts, q.size(0), q.size(1), q.size(2), q.size(3)}), dk = laid_out(k), dv = laid_out(v);
  Tensor delta = pairs.new_empty({q.size(0), q.size(1), q.size(2)});
  backward(call.problem, {heads_of(dense_grad), heads_of(dense_out), pairs.const_data_ptr<float>(), dq.data_ptr<float>(),
                          parts, heads_of(dk), heads_of(dv), delta.data_ptr<float>()});
  return {(parts == 1 ? dq[0] : dq.sum(0)).to(q.scalar_type()), dk, dv, delta};
}

Tensor run_measure(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& ranges, const MaybeTensor& sinks,
                   const MaybeTensor& seed, double scale, std::optional<double> cap, bool causal,
                   std::optional<int64_t> window, double, double threshold) {
  const Call call(q, k, v, ranges, sinks, seed, scale, cap, causal, window, 0.0);  // logits know no dropout
  Tensor results = q.new_zeros({q.size(0), q.size(1), q.size(2), 5}, at::kFloat);
  static_assert(sizeof(RowStatistics) == 5 * sizeof(float));
  measure(call.problem, threshold, reinterpret_cast<RowStatistics*>(results.data_ptr<float>()));
  return results;
}

// The arguments of norms and RoPE, as in the schema below, and of one of the norms. The order p is of norms in Python.
#define HF_QKNORM_SIDE(side)                                                                     \
  std::string_view side##_kind, const MaybeTensor &side##_gain, const MaybeTensor &side##_bias, \
      double side##_eps, double, const MaybeTensor &side##_knee
#define HF_QKNORM_SIDES \
  HF_QKNORM_SIDE(q), HF_QKNORM_SIDE(k), const MaybeTensor &cos, const MaybeTensor &sin, bool interleaved
#define HF_QKNORM_OF(side) \
  NormRope { side##_kind, side##_gain, side##_bias, side##_eps, side##_knee, cos, sin, interleaved }

// Without keys their results are undefined tensors: None.
std::tuple<Tensor, Tensor> run_norm_rope(const Tensor& q, const MaybeTensor& k, HF_QKNORM_SIDES) {
  check_norm_rope("q", q, HF_QKNORM_OF(q));
  if (k) check_keys(q, *k, HF_QKNORM_OF(k));
  return {norm_rope(dense(q), HF_QKNORM_OF(q)), k ? norm_rope(dense(*k), HF_QKNORM_OF(k)) : Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> run_norm_rope_backward(
    const Tensor& dq, const MaybeTensor& dk, const Tensor& q, const MaybeTensor& k, HF_QKNORM_SIDES) {
  check_norm_rope("q", q, HF_QKNORM_OF(q));
  check_tensor("dq", dq, q.scalar_type(), q.sizes());
  TORCH_CHECK_VALUE(dk.has_value() == k.has_value(), "dk and k must be given together");
  if (k) check_keys(q, *k, HF_QKNORM_OF(k)), check_tensor("dk", *dk, k->scalar_type(), k->sizes());
  const HeadGradients of_q = norm_rope_backward(dense(dq), dense(q), HF_QKNORM_OF(q));
  const auto of_k = k ? norm_rope_backward(dense(*dk), dense(*k), HF_QKNORM_OF(k)) : HeadGradients();
  return {of_q.x, of_k.x, of_q.gain, of_q.bias, of_k.gain, of_k.bias};
}

#define HF_QKNORM_CALL                                                                                 \
  "Tensor q, Tensor k, Tensor v, Tensor? ranges, Tensor? sinks, Tensor? seed, float scale, float? cap, " \
  "bool causal, int? window, float dropout"
#define HF_QKNORM_NORM(side) \
  "str " side "_kind, Tensor? " side "_gain, Tensor? " side "_bias, float " side "_eps, float " side "_p, Tensor? " side "_knee, "
#define HF_QKNORM_HEADS \
  "Tensor q, Tensor? k, " HF_QKNORM_NORM("q") HF_QKNORM_NORM("k") "Tensor? cos, Tensor? sin, bool interleaved"

TORCH_LIBRARY(TORCH_EXTENSION_NAME, library) {
  const auto add = [&](const char* schema, auto* run) {
    library.def(schema, torch::dispatch(c10::DispatchKey::CPU, run));
  };
  add("forward(" HF_QKNORM_CALL ", bool gradients) -> (Tensor, Tensor)", run_forward);
  add("backward(Tensor grad, Tensor out, Tensor normaliser, " HF_QKNORM_CALL ", bool gradients, int parts) "
      "-> (Tensor, Tensor, Tensor, Tensor)", run_backward);
  add("measure(" HF_QKNORM_CALL ", float threshold) -> Tensor", run_measure);
  add("norm_rope(" HF_QKNORM_HEADS ") -> (Tensor, Tensor)", run_norm_rope);
  add("norm_rope_backward(Tensor dq, Tensor? dk, " HF_QKNORM_HEADS ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      run_norm_rope_backward);
}

}  // namespace
}  // namespace hf_qknorm
