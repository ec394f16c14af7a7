#include "checks.h"

#include <ATen/MemoryOverlap.h>

#include <cmath>
#include <initializer_list>
#include <sstream>

namespace hf_qknorm {
namespace {

using at::Tensor;
using c10::ScalarType;
using MaybeTensor = std::optional<Tensor>;

// The size of an axis: a number, where `or_one` also 1, or any.
struct Axis {
  int64_t size;
  bool or_one = false;
};
constexpr Axis ANY{-1};

enum class Numbers { heads, floating, fp32, int32, int64 };  // heads: fp32, bf16 or fp16
using Shape = std::initializer_list<Axis>;

bool has(const Tensor& x, Numbers numbers) {
  const ScalarType type = x.scalar_type();
  switch (numbers) {
    case Numbers::heads: return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
    case Numbers::floating: return at::isFloatingType(type);
    case Numbers::fp32: return type == ScalarType::Float;
    case Numbers::int32: return type == ScalarType::Int;
    case Numbers::int64: return type == ScalarType::Long;
  }
  return false;
}

const char* described(Numbers numbers) {
  switch (numbers) {
    case Numbers::heads: return "of fp32, bf16 or fp16 numbers";
    case Numbers::floating: return "of floating point numbers";
    case Numbers::fp32: return "of fp32 numbers";
    case Numbers::int32: return "int32";
    case Numbers::int64: return "int64";
  }
  return "";
}

bool fits(const Tensor& x, Shape shape) {
  if (x.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t i = 0;
  for (const Axis& axis : shape) {
    const int64_t size = x.size(i++);
    if (axis.size >= 0 && size != axis.size && !(axis.or_one && size == 1)) return false;
  }
  return true;
}

std::string written(Shape shape) {
  std::ostringstream text;
  const char* separator = "[";
  for (const Axis& axis : shape) {
    text << separator;
    if (axis.size < 0) text << "any";
    else text << axis.size << (axis.or_one && axis.size != 1 ? " or 1" : "");
    separator = ", ";
  }
  text << "]";
  return text.str();
}

// Raise unless x is a strided tensor on the CPU of these numbers and this shape.
void check_tensor(const char* name, const Tensor& x, Numbers numbers, Shape shape) {
  TORCH_CHECK_VALUE(x.defined() && x.device().is_cpu() && x.layout() == at::kStrided, name,
                    " must be a strided tensor on the CPU");
  TORCH_CHECK_VALUE(has(x, numbers), name, " must be ", described(numbers), ", got ", x.scalar_type());
  TORCH_CHECK_VALUE(fits(x, shape), name, " must be ", written(shape), ", got ", x.sizes());
}

// The same for a tensor that is written by rows.
void check_written(const char* name, const Tensor& x, Numbers numbers, Shape shape) {
  check_tensor(name, x, numbers, shape);
  TORCH_CHECK_VALUE(x.stride(-1) == 1 && at::has_internal_overlap(x) != at::MemOverlap::Yes, name,
                    " must have dense rows with memory of their own, got strides ", x.strides());
}

// The same for a tensor that is read or written as one piece.
void check_packed(const char* name, const Tensor& x, Numbers numbers, Shape shape) {
  check_tensor(name, x, numbers, shape);
  TORCH_CHECK_VALUE(x.is_contiguous(), name, " must be contiguous, got strides ", x.strides());
}

void check_same_dtype(const char* name, const Tensor& x, const Tensor& q) {
  TORCH_CHECK_VALUE(x.scalar_type() == q.scalar_type(), name, " must have the dtype of q, ", q.scalar_type(), ", got ",
                    x.scalar_type());
}

// Heads [B, H, T, D]
void check_heads(const char* name, const Tensor& x) {
  check_tensor(name, x, Numbers::heads, {ANY, ANY, ANY, ANY});
  TORCH_CHECK_VALUE(x.size(1) >= 1 && x.size(3) >= 1 && x.size(3) <= MOST_COLUMNS, name,
                    " must have at least one head, and 1 to ", MOST_COLUMNS, " columns, got ", x.sizes());
}

// A norm's gain or bias: [1], [D] or [H, D]
void check_parameter(const char* name, const MaybeTensor& x, int64_t heads, int64_t columns) {
  if (!x) return;
  if (x->dim() == 2) check_tensor(name, *x, Numbers::floating, {{heads}, {columns}});
  else check_tensor(name, *x, Numbers::floating, {{columns, true}});
}

}  // namespace

void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& ranges,
                     const MaybeTensor& sinks, const MaybeTensor& seed, double scale, std::optional<double> cap,
                     bool causal, std::optional<int64_t> window, double dropout) {
  check_heads("q", q);
  check_heads("k", k);
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2);
  check_tensor("k", k, Numbers::heads, {{batch}, ANY, ANY, {q.size(3)}});
  check_tensor("v", v, Numbers::heads, {{batch}, {k.size(1)}, {k.size(2)}, {q.size(3)}});
  check_same_dtype("k", k, q);
  check_same_dtype("v", v, q);
  TORCH_CHECK_VALUE(heads % k.size(1) == 0, "k must have a number of heads that divides the ", heads, " of q, got ",
                    k.sizes());
  TORCH_CHECK_VALUE(k.size(2) <= MOST_KEYS, "k must have at most ", MOST_KEYS, " keys, got ", k.sizes());
  if (ranges) check_tensor("ranges", *ranges, Numbers::int32, {{batch, true}, {queries}, {2}});
  if (sinks) check_tensor("sinks", *sinks, Numbers::floating, {{heads}});
  if (seed) check_tensor("seed", *seed, Numbers::int64, {{1}});
  TORCH_CHECK_VALUE(std::isfinite(scale), "scale must be finite, got ", scale);
  TORCH_CHECK_VALUE(!cap || (std::isfinite(*cap) && *cap > 0), "cap must be finite and above 0, got ", *cap);
  TORCH_CHECK_VALUE(!window || *window >= int64_t(causal), "window must be at least ", int64_t(causal), ", got ", *window);
  TORCH_CHECK_VALUE(dropout >= 0 && dropout < 1, "dropout must be in [0, 1), got ", dropout);
  TORCH_CHECK_VALUE(dropout == 0 || seed, "seed must be given with dropout ", dropout);
}

void check_gradients(const Tensor& q, const Tensor& k, const Tensor& grad, const Tensor& out, const Tensor& normaliser,
                     const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& delta) {
  const Axis batch{q.size(0)}, heads{q.size(1)}, queries{q.size(2)}, columns{q.size(3)};
  const Axis key_heads{k.size(1)}, keys{k.size(2)};
  check_tensor("grad", grad, Numbers::heads, {batch, heads, queries, columns});
  check_tensor("out", out, Numbers::heads, {batch, heads, queries, columns});
  check_written("dk", dk, Numbers::heads, {batch, key_heads, keys, columns});
  check_written("dv", dv, Numbers::heads, {batch, key_heads, keys, columns});
  check_same_dtype("grad", grad, q);
  check_same_dtype("out", out, q);
  check_same_dtype("dk", dk, q);
  check_same_dtype("dv", dv, q);
  check_packed("normaliser", normaliser, Numbers::fp32, {batch, heads, queries, {2}});
  check_packed("delta", delta, Numbers::fp32, {batch, heads, queries});
  check_packed("dq", dq, Numbers::fp32, {ANY, batch, heads, queries, columns});
  TORCH_CHECK_VALUE(dq.size(0) >= 1, "dq must have at least one part, got ", dq.sizes());
}

void check_norm_rope(const Tensor& x, const NormRope& by) {
  const auto& [kind, gain, bias, cos, sin, interleaved] = by;
  check_heads("x", x);
  const int64_t batch = x.size(0), length = x.size(2), columns = x.size(3);
  check_parameter("gain", gain, x.size(1), columns);
  check_parameter("bias", bias, x.size(1), columns);
  TORCH_CHECK_VALUE(kind.eps >= 0, "eps must not be negative, got ", kind.eps);
  TORCH_CHECK_VALUE(kind.sharpness >= 1, "sharpness must be at least 1, got ", kind.sharpness);
  TORCH_CHECK_VALUE(kind.length > 0, "length must be above 0, got ", kind.length);
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), "cos and sin must be given together");
  if (!cos) return;
  check_tensor("cos", *cos, Numbers::floating, {{batch, true}, {length}, ANY});
  check_tensor("sin", *sin, Numbers::floating, {{cos->size(0)}, {length}, {cos->size(2)}});
  TORCH_CHECK_VALUE(2 * cos->size(2) <= columns, "cos must have at most half as many angles as the heads have columns, ",
                    columns / 2, ", got ", cos->sizes());
}

void check_head_gradient(const Tensor& x, const Tensor& grad) {
  check_tensor("grad", grad, Numbers::heads, {{x.size(0)}, {x.size(1)}, {x.size(2)}, {x.size(3)}});
  TORCH_CHECK_VALUE(grad.scalar_type() == x.scalar_type(), "grad must have the dtype of x, ", x.scalar_type(),
                    ", got ", grad.scalar_type());
}

}  // namespace hf_qknorm
