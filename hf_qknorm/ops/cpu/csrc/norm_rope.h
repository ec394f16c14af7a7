// Norm and RoPE of heads.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace hf_qknorm {

constexpr int64_t MOST_COLUMNS = 256;

// A norm of rows of heads, with its gain and bias ("none": neither), and then the rotation by angles [B or 1, T, R/2] of
// columns i and i + R/2, or 2i and 2i + 1 if interleaved. `knee` [3] is a `norms.Shape`.
struct NormRope {
  std::string_view kind;
  const std::optional<at::Tensor>&gain, &bias;
  double eps;
  const std::optional<at::Tensor>&knee, &cos, &sin;
  bool interleaved;
};

// x [B, H, T, D] after these; contiguous, as attention reads them fastest. A row of zeros stays zero. The rows of x are
// dense, and all arguments are checked.
at::Tensor norm_rope(const at::Tensor& x, const NormRope& by);

// Gradients of x, laid out as [B, T, H, D], and of gain and bias, [0, D] without one.
struct HeadGradients {
  at::Tensor x, gain, bias;
};

// The gradients for `grad` [B, H, T, D], that of the result, each in the dtype of its tensor. The rows of grad are dense.
// A row of zeros has a gradient of zero. With the same number of threads, they are the same bits on each run.
HeadGradients norm_rope_backward(const at::Tensor& grad, const at::Tensor& x, const NormRope& by);

}  // namespace hf_qknorm
