// Vectors of fp32 numbers, the dtype of the heads and conversions, and scratch memory of a thread.
#pragma once

#include <ATen/cpu/vec/vec.h>  // first: with AVX2 it includes the next one, which can't begin by itself
#include <ATen/cpu/vec/functional_base.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

namespace hf_qknorm {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();

inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// Vectors that take the same steps side by side: a CPU waits for the result of each step, and meanwhile has the others.
template <int COUNT>
struct Vecs {
  Vec part[COUNT];

  // The results of make(i) for each of the vectors
  template <class Make>
  __attribute__((always_inline)) static Vecs of(Make make) {
    Vecs vectors;
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) vectors.part[i] = make(i);
    return vectors;
  }
  Vec& operator[](int i) { return part[i]; }
  const Vec& operator[](int i) const { return part[i]; }
};

inline Vec load_wide(const float* x) { return Vec::loadu(x); }

template <class T>
inline Vec load_wide(const T* x) {
  Vec wide;
  if constexpr (std::is_same_v<T, c10::Half>) at::vec::load_fp32_from_fp16(x, wide);
  else at::vec::load_fp32_from_bf16(x, wide);
  return wide;
}

// to[i] = from[i] in fp32
template <class T>
inline void widen(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) load_wide(from + i).store(to + i);
  for (; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

// to[i] = from[i] in the dtype of the heads
template <class T>
inline void narrow(const float* from, T* to, int64_t count) {
  at::vec::convert(from, to, count);
}

// to [columns, rows] = the transpose of from [rows, columns], with rows and columns multiples of LANES
inline void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; r += LANES)
    for (int64_t c = 0; c < columns; c += LANES)
      at::vec::transpose_mxn<float, LANES, LANES>(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
}

// Call run(number) with a number of the dtype of the heads.
template <class Run>
void with_dtype(c10::ScalarType dtype, const Run& run) {
  switch (dtype) {
    case c10::ScalarType::BFloat16: return run(c10::BFloat16());
    case c10::ScalarType::Half: return run(c10::Half());
    default: return run(float());
  }
}

// Memory for fp32 numbers at the start of a cache line, freed with its owner.
struct Scratch {
  std::unique_ptr<void, decltype(&std::free)> memory;

  explicit Scratch(int64_t count) : memory(std::aligned_alloc(64, (count * sizeof(float) / 64 + 1) * 64), &std::free) {
    if (!memory) throw std::bad_alloc();
  }
  float* data() const { return static_cast<float*>(memory.get()); }
};

}  // namespace hf_qknorm
