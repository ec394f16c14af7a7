// The checks of the operators' arguments: all that the kernels rely on, before they touch memory.
//
// The table of these checks is ops/OPERATORS.md; recipes/benchmarks/fuzz_operators.py breaks each of its lines.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "norm_rope.h"

namespace hf_qknorm {

constexpr int64_t MOST_COLUMNS = 256;
constexpr int64_t MOST_KEYS = 1 << 24;  // positions are compared in fp32

// Each raises ValueError, with the argument's name, for one that does not fit.

// The arguments of every pass of attention.
void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& ranges, const std::optional<at::Tensor>& sinks,
                     const std::optional<at::Tensor>& seed, double scale, std::optional<double> cap, bool causal,
                     std::optional<int64_t> window, double dropout);

// The arguments of backward beside these.
void check_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& grad, const at::Tensor& out,
                     const at::Tensor& normaliser, const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                     const at::Tensor& delta);

// Heads, their norm and rotation.
void check_norm_rope(const at::Tensor& x, const NormRope& by);

// The gradient of normed and rotated heads x.
void check_head_gradient(const at::Tensor& x, const at::Tensor& grad);

}  // namespace hf_qknorm
