// The checks of the operators' arguments: all that the kernels rely on, before they touch memory. Each raises ValueError,
// with the argument's name, for one that does not fit.
//
// The table of these checks is ops/OPERATORS.md; recipes/benchmarks/fuzz_operators.py breaks each of its lines.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>
#include <string>

#include "norm_rope.h"

namespace hf_qknorm {

using at::Tensor;
using c10::ScalarType;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t MOST_KEYS = 1 << 24;  // positions are compared in fp32

// A strided tensor on the CPU of this shape.
inline void check_shape(const char* name, const Tensor& x, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(x.defined() && x.device().is_cpu() && x.layout() == at::kStrided, name,
                    " must be a strided tensor on the CPU");
  TORCH_CHECK_VALUE(x.sizes() == shape, name, " must be ", shape, ", got ", x.sizes());
}

inline void check_tensor(const char* name, const Tensor& x, ScalarType type, at::IntArrayRef shape) {
  check_shape(name, x, shape);
  TORCH_CHECK_VALUE(x.scalar_type() == type, name, " must be of ", type, ", got ", x.scalar_type());
}

inline void check_floating(const char* name, const Tensor& x, at::IntArrayRef shape) {
  check_shape(name, x, shape);
  TORCH_CHECK_VALUE(at::isFloatingType(x.scalar_type()), name, " must be of floating point numbers, got ", x.scalar_type());
}

inline void check_head_type(const char* name, const Tensor& x) {
  const ScalarType type = x.scalar_type();
  TORCH_CHECK_VALUE(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half, name,
                    " must be of fp32, bf16 or fp16 numbers, got ", type);
}

// Heads [B, H, T, D]
inline void check_heads(const char* name, const Tensor& x) {
  check_shape(name, x, x.sizes());
  TORCH_CHECK_VALUE(x.dim() == 4 && x.size(1) >= 1 && x.size(3) >= 1 && x.size(3) <= MOST_COLUMNS, name,
                    " must be [B, H, T, D] with at least one head, and 1 to ", MOST_COLUMNS, " columns, got ", x.sizes());
  check_head_type(name, x);
}

// The arguments of every pass of attention.
inline void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& ranges,
                            const MaybeTensor& sinks, const MaybeTensor& seed, double scale, std::optional<double> cap,
                            bool causal, std::optional<int64_t> window, double dropout) {
  check_heads("q", q);
  check_heads("k", k);
  const int64_t batch = q.size(0), heads = q.size(1), keys = k.size(2);
  check_tensor("k", k, q.scalar_type(), {batch, k.size(1), keys, q.size(3)});
  check_tensor("v", v, q.scalar_type(), k.sizes());
  TORCH_CHECK_VALUE(heads % k.size(1) == 0, "k must have a number of heads that divides ", heads, ", got ", k.sizes());
  TORCH_CHECK_VALUE(keys <= MOST_KEYS, "k must have at most ", MOST_KEYS, " keys, got ", k.sizes());
  if (ranges) {
    const bool shared = ranges->dim() > 0 && ranges->size(0) == 1;
    check_tensor("ranges", *ranges, ScalarType::Int, {shared ? 1 : batch, q.size(2), 2});
  }
  if (sinks) check_floating("sinks", *sinks, {heads});
  if (seed) check_tensor("seed", *seed, ScalarType::Long, {1});
  TORCH_CHECK_VALUE(std::isfinite(scale), "scale must be finite, got ", scale);
  TORCH_CHECK_VALUE(!cap || (std::isfinite(*cap) && *cap > 0), "cap must be finite and above 0, got ", *cap);
  TORCH_CHECK_VALUE(!window || *window >= int64_t(causal), "window must be at least ", int64_t(causal), ", got ", *window);
  TORCH_CHECK_VALUE(dropout >= 0 && dropout < 1, "dropout must be in [0, 1), got ", dropout);
  TORCH_CHECK_VALUE(dropout == 0 || seed, "seed must be given with dropout ", dropout);
}

// The arguments of backward beside these.
inline void check_gradients(const Tensor& q, const Tensor& grad, const Tensor& out, const Tensor& normaliser, int64_t parts) {
  check_tensor("grad", grad, q.scalar_type(), q.sizes());
  check_tensor("out", out, q.scalar_type(), q.sizes());
  check_tensor("normaliser", normaliser, ScalarType::Float, {q.size(0), q.size(1), q.size(2), 2});
  TORCH_CHECK_VALUE(parts >= 1 && parts <= MOST_KEYS, "parts must be from 1 to ", MOST_KEYS, ", got ", parts);
}

// A norm's gain or bias: [1], [D] or [H, D]
inline void check_parameter(const std::string& name, const MaybeTensor& x, int64_t heads, int64_t columns) {
  if (!x) return;
  if (x->dim() == 2) check_floating(name.c_str(), *x, {heads, columns});
  else check_floating(name.c_str(), *x, {x->numel() == 1 ? 1 : columns});
}

// Heads, their norm and rotation; `side` is q or k.
inline void check_norm_rope(const std::string& side, const Tensor& x, const NormRope& by) {
  const auto& [kind, gain, bias, eps, knee, cos, sin, interleaved] = by;
  check_heads(side.c_str(), x);
  TORCH_CHECK_VALUE(kind == "none" || kind == "rms" || kind == "layer" || kind == "l2", side,
                    "_kind must be none, rms, layer or l2, got ", kind);
  check_parameter(side + "_gain", gain, x.size(1), x.size(3));
  check_parameter(side + "_bias", bias, x.size(1), x.size(3));
  TORCH_CHECK_VALUE(eps >= 0, side, "_eps must not be negative, got ", eps);
  if (knee) check_shape((side + "_knee").c_str(), *knee, {3}), check_head_type((side + "_knee").c_str(), *knee);
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), "cos and sin must be given together");
  if (!cos) return;
  TORCH_CHECK_VALUE(cos->dim() == 3 && 2 * cos->size(2) <= x.size(3),
                    "cos must be [B or 1, T, R] with at most ", x.size(3) / 2, " angles, got ", cos->sizes());
  check_floating("cos", *cos, {cos->size(0) == 1 ? 1 : x.size(0), x.size(2), cos->size(2)});
  check_floating("sin", *sin, cos->sizes());
}

// Keys beside their queries, with their norm and rotation.
inline void check_keys(const Tensor& q, const Tensor& k, const NormRope& by) {
  check_heads("k", k);
  check_tensor("k", k, q.scalar_type(), {q.size(0), k.size(1), q.size(2), q.size(3)});
  check_norm_rope("k", k, by);
}

}  // namespace hf_qknorm
