// Norm and RoPE of heads, and their gradients: one pass over each row, in fp32, rounded once.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "norm_rope.h"
#include "vectors.h"

namespace hf_qknorm {
namespace {

constexpr int64_t COLUMNS_OF_A_THREAD = 1 << 15;  // fewer take less time than to wake another thread

// A parameter of a norm in fp32: a row for each head, or one for all.
struct Parameter {
  at::Tensor kept;
  const float* data = nullptr;
  int64_t head = 0;  // stride

  Parameter(const std::optional<at::Tensor>& x, int64_t columns) {
    if (!x) return;
    kept = x->to(at::kFloat);
    kept = (kept.dim() == 1 ? kept.expand({columns}) : kept).contiguous();
    data = kept.const_data_ptr<float>();
    if (kept.dim() > 1) head = columns;
  }
  const float* at(int64_t h) const { return data + h * head; }
};

// Angles [B or 1, T, R/2], in fp32, in dense rows.
struct Angles {
  at::Tensor kept;
  const float* data = nullptr;
  int64_t batch = 0, row = 0, pairs = 0;

  explicit Angles(const std::optional<at::Tensor>& x) {
    if (!x) return;
    kept = x->to(at::kFloat);
    if (kept.stride(2) != 1) kept = kept.contiguous();
    data = kept.const_data_ptr<float>();
    batch = kept.size(0) > 1 ? kept.stride(0) : 0, row = kept.stride(1), pairs = kept.size(2);
  }
  const float* at(int64_t b, int64_t t) const { return data + b * batch + t * row; }
};

double dot(const float* x, const float* y, int64_t count) {
  Vec sums(0.0f);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sums = at::vec::fmadd(Vec::loadu(x + i), Vec::loadu(y + i), sums);
  double sum = at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return a + b; }, sums);
  for (; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

void centre(float* x, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i];
  const float mean = static_cast<float>(sum / static_cast<double>(count));
  for (int64_t i = 0; i < count; ++i) x[i] -= mean;
}

// (aˢ + bˢ)^(1/s), from the ratio of the smaller to the larger: powers of the numbers themselves would overflow
double smooth_maximum(double a, double b, double sharpness) {
  if (sharpness == 1) return a + b;
  const double larger = std::max(a, b);
  return larger * std::pow(1 + std::pow(std::min(a, b) / larger, sharpness), 1 / sharpness);
}

// A norm of rows y: of x, or of x minus its mean; divided by the root of ((mean y²)ˢ + epsˢ)^(1/s), times the length.
struct NormKind {
  bool normed, centred;
  double eps, sharpness, length;

  // For heads of so many columns. The knee holds the base-2 logarithms of ε and P over the scheme's eps, and s, in bf16.
  NormKind(const NormRope& by, int64_t columns) : normed(by.kind != "none"), centred(by.kind == "layer") {
    double numbers[3] = {0, 0, 1};
    if (by.knee)
      with_dtype(by.knee->scalar_type(), [&](auto zero) {
        const auto* from = by.knee->const_data_ptr<decltype(zero)>();
        for (int i = 0; i < 3; ++i) numbers[i] = c10::BFloat16(static_cast<float>(from[i * by.knee->stride(0)]));
      });
    eps = by.eps * std::exp2(numbers[0]), sharpness = numbers[2];
    length = by.kind == "l2" ? 1 / std::sqrt(static_cast<double>(columns)) : 1;
    if (numbers[1] != 0) length = std::sqrt(smooth_maximum(by.eps * std::exp2(numbers[1]), eps, sharpness));
  }
};

// A `NormRope` for heads x, with its tensors in fp32.
struct Steps {
  NormKind kind;
  Parameter gain, bias;
  Angles cos, sin;
  bool interleaved;

  Steps(const at::Tensor& x, const NormRope& by)
      : kind(by, x.size(3)), gain(by.gain, x.size(3)), bias(by.bias, x.size(3)), cos(by.cos), sin(by.sin),
        interleaved(by.interleaved) {}
};

// A row y becomes n = r·y, and its gradient r·(g - n·slope·Σ g·n).
struct Normaliser {
  float r;
  double slope;
};

// Normalise a row in place, without gain and bias.
Normaliser normalise(const NormKind& kind, float* x, int64_t count) {
  if (kind.centred) centre(x, count);
  const double square = dot(x, x, count) / static_cast<double>(count);
  if (square == 0) {
    std::fill(x, x + count, 0.0f);
    return {0.0f, 0.0};
  }
  const double size = smooth_maximum(square, kind.eps, kind.sharpness), length = kind.length;
  const float r = static_cast<float>(length / std::sqrt(size));
  for (int64_t i = 0; i < count; ++i) x[i] *= r;
  const double slope = std::pow(square / size, kind.sharpness) * size / square;  // d size / d square
  return {r, slope / (static_cast<double>(count) * length * length)};
}

// Turn pairs of columns, or turn them back.
void rotate(const float* cos, const float* sin, int64_t pairs, bool interleaved, float sign, float* x) {
  if (interleaved) {
    for (int64_t i = 0; i < pairs; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1], c = cos[i], s = sign * sin[i];
      x[2 * i] = a * c - b * s, x[2 * i + 1] = b * c + a * s;
    }
    return;
  }
  float *__restrict first = x, *__restrict second = x + pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = first[i], b = second[i], c = cos[i], s = sign * sin[i];
    first[i] = a * c - b * s, second[i] = b * c + a * s;
  }
}

// Call visit(b, t, head, item) for the items of [begin, end) of heads that are laid out as [B, T, H, D].
template <class Visit>
void each_row(const at::Tensor& x, int64_t begin, int64_t end, const Visit& visit) {
  const int64_t heads = x.size(1), length = x.size(2);
  for (int64_t item = begin; item < end; ++item) visit(item / heads / length, item / heads % length, item % heads, item);
}

template <class T>
T* row_of(const at::Tensor& x, T* data, int64_t b, int64_t t, int64_t head) {
  return data + b * x.stride(0) + head * x.stride(1) + t * x.stride(2);
}

template <class T>
void all_rows(const at::Tensor& x, const Steps& by, const at::Tensor& out) {
  const int64_t heads = x.size(1), length = x.size(2), count = x.size(3);
  const int64_t grain = std::max<int64_t>(COLUMNS_OF_A_THREAD / count, 1);
  const T* from = x.const_data_ptr<T>();
  T* to = out.data_ptr<T>();
  at::parallel_for(0, x.size(0) * heads * length, grain, [&](int64_t begin, int64_t end) {
    each_row(x, begin, end, [&](int64_t b, int64_t t, int64_t head, int64_t) {
      float row[MOST_COLUMNS];
      widen(row_of(x, from, b, t, head), row, count);
      if (by.kind.normed) {
        normalise(by.kind, row, count);
        if (by.gain.data)
          for (int64_t i = 0; i < count; ++i) row[i] *= by.gain.at(head)[i];
        if (by.bias.data)
          for (int64_t i = 0; i < count; ++i) row[i] += by.bias.at(head)[i];
      }
      if (by.cos.data) rotate(by.cos.at(b, t), by.sin.at(b, t), by.cos.pairs, by.interleaved, 1.0f, row);
      narrow(row, row_of(out, to, b, t, head), count);
    });
  });
}

// Sums of gradients by head and column.
using Sums = std::vector<double>;

// The gradient dx of a row x, from that of its result. Adds to the sums of its head.
template <class T>
void gradient_of_row(const T* x, const T* grad, const Steps& by, int64_t b, int64_t t, int64_t head, int64_t count,
                     T* dx, Sums& dgain, Sums& dbias) {
  float y[MOST_COLUMNS], g[MOST_COLUMNS];
  widen(x, y, count), widen(grad, g, count);
  if (by.cos.data) rotate(by.cos.at(b, t), by.sin.at(b, t), by.cos.pairs, by.interleaved, -1.0f, g);
  if (by.kind.normed) {
    const auto [r, slope] = normalise(by.kind, y, count);
    if (by.bias.data)
      for (int64_t i = 0; i < count; ++i) dbias[head * count + i] += g[i];
    if (by.gain.data) {
      for (int64_t i = 0; i < count; ++i) dgain[head * count + i] += g[i] * y[i];
      for (int64_t i = 0; i < count; ++i) g[i] *= by.gain.at(head)[i];
    }
    const float along = static_cast<float>(slope * dot(g, y, count));
    for (int64_t i = 0; i < count; ++i) g[i] = r * (g[i] - along * y[i]);
    if (by.kind.centred) centre(g, count);
  }
  narrow(g, dx, count);
}

// Each thread has one part of the rows and sums of its own, so that the gradients are the same bits on each run.
template <class T>
void all_gradients(const at::Tensor& x, const at::Tensor& grad, const Steps& by, T* dx, float* dgain, float* dbias) {
  const int64_t heads = x.size(1), count = x.size(3), rows = x.size(0) * x.size(2), width = heads * count;
  const int64_t parts = std::clamp<int64_t>(rows * width / COLUMNS_OF_A_THREAD, 1, at::get_num_threads());
  std::vector<Sums> gains(parts), biases(parts);
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      gains[part].assign(dgain ? width : 0, 0.0), biases[part].assign(dbias ? width : 0, 0.0);
      each_row(x, part * rows / parts * heads, (part + 1) * rows / parts * heads,
               [&](int64_t b, int64_t t, int64_t head, int64_t item) {
                 gradient_of_row(row_of(x, x.const_data_ptr<T>(), b, t, head),
                                 row_of(grad, grad.const_data_ptr<T>(), b, t, head), by, b, t, head, count,
                                 dx + item * count, gains[part], biases[part]);
               });
    }
  });
  for (auto [sums, total] : {std::pair(&gains, dgain), std::pair(&biases, dbias)})
    for (int64_t i = 0; total && i < width; ++i) {
      double sum = 0;
      for (const Sums& part : *sums) sum += part[i];
      total[i] = static_cast<float>(sum);
    }
}

}  // namespace

at::Tensor norm_rope(const at::Tensor& x, const NormRope& by) {
  at::Tensor out = x.new_empty(x.sizes());
  const Steps steps(x, by);
  with_dtype(x.scalar_type(), [&](auto zero) { all_rows<decltype(zero)>(x, steps, out); });
  return out;
}

HeadGradients norm_rope_backward(const at::Tensor& grad, const at::Tensor& x, const NormRope& by) {
  const Steps steps(x, by);
  const auto sums = [&](const Parameter& parameter) {
    return x.new_zeros({parameter.data ? x.size(1) : 0, x.size(3)}, at::kFloat);
  };
  at::Tensor dx = x.new_empty({x.size(0), x.size(2), x.size(1), x.size(3)});
  at::Tensor dgain = sums(steps.gain), dbias = sums(steps.bias);
  with_dtype(x.scalar_type(), [&](auto zero) {
    all_gradients(x, grad, steps, dx.data_ptr<decltype(zero)>(), steps.gain.data ? dgain.data_ptr<float>() : nullptr,
                  steps.bias.data ? dbias.data_ptr<float>() : nullptr);
  });
  const auto like = [](const at::Tensor& sums, const std::optional<at::Tensor>& parameter) {
    return parameter ? sums.sum_to_size(parameter->sizes()).to(parameter->scalar_type()) : sums;
  };
  return {dx.transpose(1, 2), like(dgain, by.gain), like(dbias, by.bias)};
}

}  // namespace hf_qknorm
