// Norm and RoPE of heads, for inference: one pass over each row, in fp32, rounded once.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "checks.h"
#include "norm_rope.h"
#include "vectors.h"

namespace hf_qknorm {
namespace {

constexpr int64_t COLUMNS_OF_A_THREAD = 1 << 15;  // fewer take less time than to wake another thread

// A parameter of a norm, [D], [H, D] or one number, in fp32.
struct Parameter {
  at::Tensor kept;
  const float* data = nullptr;
  int64_t head = 0, column = 0;  // strides

  explicit Parameter(const std::optional<at::Tensor>& x) {
    if (!x) return;
    kept = x->to(at::kFloat);
    data = kept.const_data_ptr<float>();
    if (kept.numel() > 1) column = kept.stride(-1), head = kept.dim() > 1 ? kept.stride(0) : 0;
  }
};

// Angles [B or 1, T, R/2], in fp32.
struct Angles {
  at::Tensor kept;
  const float* data = nullptr;
  int64_t batch = 0, row = 0, column = 0, pairs = 0;

  explicit Angles(const std::optional<at::Tensor>& x) {
    if (!x) return;
    kept = x->to(at::kFloat);
    data = kept.const_data_ptr<float>();
    batch = kept.size(0) > 1 ? kept.stride(0) : 0, row = kept.stride(1), column = kept.stride(2), pairs = kept.size(2);
  }
  const float* at(int64_t b, int64_t t) const { return data + b * batch + t * row; }
};

double mean_square(const float* x, int64_t count) {
  Vec sums(0.0f);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sums = at::vec::fmadd(Vec::loadu(x + i), Vec::loadu(x + i), sums);
  float lanes[LANES];
  sums.store(lanes);
  double sum = 0;
  for (float lane : lanes) sum += lane;
  for (; i < count; ++i) sum += x[i] * x[i];
  return sum / static_cast<double>(count);
}

// (aˢ + bˢ)^(1/s), from the ratio of the smaller to the larger: powers of the numbers themselves would overflow
double smooth_maximum(double a, double b, int64_t sharpness) {
  if (sharpness == 1) return a + b;
  const double larger = std::max(a, b);
  double sum = std::min(a, b) / larger;
  for (int64_t s = 1; s < sharpness; s *= 2) sum *= sum;
  sum += 1;
  for (int64_t s = 1; s < sharpness; s *= 2) sum = std::sqrt(sum);
  return larger * sum;
}

void normalise(const NormKind& kind, const Parameter& gain, const Parameter& bias, int64_t head, float* x, int64_t count) {
  if (kind.centred) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += x[i];
    const float mean = static_cast<float>(sum / static_cast<double>(count));
    for (int64_t i = 0; i < count; ++i) x[i] -= mean;
  }
  const double square = mean_square(x, count), columns = kind.summed ? static_cast<double>(count) : 1.0;
  const double size = smooth_maximum(square, kind.eps, kind.sharpness);
  const float factor = square > 0 ? static_cast<float>(1.0 / std::sqrt(columns * size)) : 0.0f;
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
  if (gain.data)
    for (int64_t i = 0; i < count; ++i) x[i] *= gain.data[head * gain.head + i * gain.column];
  if (bias.data)
    for (int64_t i = 0; i < count; ++i) x[i] += bias.data[head * bias.head + i * bias.column];
}

void rotate(const float* cos, int64_t cos_step, const float* sin, int64_t sin_step, int64_t pairs, bool interleaved,
            float* x) {
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    float &first = x[i * step], &second = x[i * step + apart];
    const float a = first, b = second, c = cos[i * cos_step], s = sin[i * sin_step];
    first = a * c - b * s, second = b * c + a * s;
  }
}

template <class T>
void all_rows(const at::Tensor& x, const NormKind& kind, const Parameter& gain, const Parameter& bias,
              const Angles& cos, const Angles& sin, bool interleaved, T* out) {
  const int64_t heads = x.size(1), length = x.size(2), count = x.size(3);
  const T* from = x.const_data_ptr<T>();
  const int64_t grain = std::max<int64_t>(COLUMNS_OF_A_THREAD / count, 1);
  at::parallel_for(0, x.size(0) * length * heads, grain, [&](int64_t begin, int64_t end) {
    float row[MOST_COLUMNS];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item % heads, t = item / heads % length, b = item / heads / length;
      widen(from + b * x.stride(0) + head * x.stride(1) + t * x.stride(2), row, count);
      if (kind.normed) normalise(kind, gain, bias, head, row, count);
      if (cos.data) rotate(cos.at(b, t), cos.column, sin.at(b, t), sin.column, cos.pairs, interleaved, row);
      narrow(row, out + item * count, count);
    }
  });
}

}  // namespace

at::Tensor norm_rope(const at::Tensor& x, const NormKind& kind, const std::optional<at::Tensor>& gain,
                     const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& cos,
                     const std::optional<at::Tensor>& sin, bool interleaved) {
  at::Tensor out = at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options());
  const Parameter gains(gain), biases(bias);
  const Angles cosines(cos), sines(sin);
  switch (x.scalar_type()) {
    case c10::ScalarType::BFloat16:
      all_rows(x, kind, gains, biases, cosines, sines, interleaved, out.data_ptr<c10::BFloat16>());
      break;
    case c10::ScalarType::Half:
      all_rows(x, kind, gains, biases, cosines, sines, interleaved, out.data_ptr<c10::Half>());
      break;
    default: all_rows(x, kind, gains, biases, cosines, sines, interleaved, out.data_ptr<float>());
  }
  return out.transpose(1, 2);
}

}  // namespace hf_qknorm
