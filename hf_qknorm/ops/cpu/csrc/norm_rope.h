// Norm and RoPE of heads.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace hf_qknorm {

constexpr int64_t MOST_COLUMNS = 256;

// A norm of rows y: of x, or of x minus its mean; divided by the root of ((mean y²)ˢ + epsˢ)^(1/s), times the length.
struct NormKind {
  bool normed, centred;
  double eps, sharpness, length;
};

// A norm with its gain and bias, and then the rotation by angles [B or 1, T, R/2] of columns i and i + R/2, or 2i and
// 2i + 1 if interleaved.
struct NormRope {
  NormKind kind;
  const std::optional<at::Tensor>&gain, &bias, &cos, &sin;
  bool interleaved;
};

// x [B, H, T, D] after these; contiguous, as attention reads them fastest. A row of zeros stays zero. The rows of x are
// dense, and all arguments are checked.
at::Tensor norm_rope(const at::Tensor& x, const NormRope& by);

// Gradients of x, laid out as [B, T, H, D], and of gain and bias, summed by head: [H, D] in fp32, [0, D] without one.
using HeadGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The gradients for `grad` [B, H, T, D], that of the result, in the dtype of x. The rows of grad are dense. A row of
// zeros has a gradient of zero. With the same number of threads, they are the same bits on each run.
HeadGradients norm_rope_backward(const at::Tensor& grad, const at::Tensor& x, const NormRope& by);

}  // namespace hf_qknorm
