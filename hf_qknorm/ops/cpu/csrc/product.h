// Matrix products of small matrices in one thread, in tiles that stay in registers: of fp32 numbers, or of pairs of bf16
// numbers, which lie side by side along the inner axis, where the CPU has instructions for them.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace hf_qknorm {

// The left factor of a product, element (m, k): numbers are read one at a time, so that any layout serves.
template <class N>
struct RowsOf {  // rows lie one after the other
  const N* data;
  int64_t stride;
  N operator()(int64_t m, int64_t k) const { return data[m * stride + k]; }
  RowsOf from_row(int64_t m) const { return {data + m * stride, stride}; }
  RowsOf from_column(int64_t k) const { return {data + k, stride}; }
};
template <class N>
struct ColumnsOf {  // columns lie one after the other: a transposed matrix
  const N* data;
  int64_t stride;
  N operator()(int64_t m, int64_t k) const { return data[k * stride + m]; }
  ColumnsOf from_row(int64_t m) const { return {data + m, stride}; }
  ColumnsOf from_column(int64_t k) const { return {data + k * stride, stride}; }
};
using ByRow = RowsOf<float>;
using ByColumn = ColumnsOf<float>;
using Pair = uint32_t;  // two bf16 numbers, the first in the lower half

inline Vec row_of(const float* x) { return Vec::loadu(x); }
inline Vec number_of(float x) { return Vec(x); }
inline Vec add_products(Vec sums, Vec number, Vec row) { return at::vec::fmadd(number, row, sums); }
#if defined(__AVX512BF16__)
inline __m512i row_of(const Pair* x) { return _mm512_loadu_si512(x); }
inline __m512i number_of(Pair x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline Vec add_products(Vec sums, __m512i pair, __m512i row) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(pair), reinterpret_cast<__m512bh>(row));
}
#endif

// Rows and vectors of a tile: the sums, the vectors of a row of B and one number of A fill the registers.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int TILE_ROWS = 8, TILE_VECTORS = 2;  // of 32 registers; larger tiles were not faster
#else
constexpr int TILE_ROWS = 6, TILE_VECTORS = 2;  // of 16 registers
#endif

// A tile of C [ROWS, VECTORS·LANES] = or += A [ROWS, inner] B [inner, VECTORS·LANES]. The product is added to C as a whole:
// sums of partial sums round less than one long sum.
template <int ROWS, int VECTORS, bool ADD, class A, class N>
inline void multiply_tile(A a, const N* b, int64_t b_stride, float* c, int64_t c_stride, int64_t inner) {
  Vec sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < VECTORS; ++n) sums[m][n] = Vec(0.0f);
  for (int64_t k = 0; k < inner; ++k) {
    decltype(row_of(b)) row[VECTORS];
    for (int n = 0; n < VECTORS; ++n) row[n] = row_of(b + k * b_stride + n * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const auto number = number_of(a(m, k));
#pragma GCC unroll 4
      for (int n = 0; n < VECTORS; ++n) sums[m][n] = add_products(sums[m][n], number, row[n]);
    }
  }
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < VECTORS; ++n) {
      float* to = c + m * c_stride + n * LANES;
      (ADD ? Vec::loadu(to) + sums[m][n] : sums[m][n]).store(to);
    }
}

// The last rows, fewer than 2·ROWS, by tiles of powers of two.
template <int ROWS, int VECTORS, bool ADD, class A, class N>
inline void multiply_rest(
    int64_t rows, A a, const N* b, int64_t b_stride, float* c, int64_t c_stride, int64_t inner) {
  if (rows >= ROWS) {
    multiply_tile<ROWS, VECTORS, ADD>(a, b, b_stride, c, c_stride, inner);
    rows -= ROWS, a = a.from_row(ROWS), c += ROWS * c_stride;
  }
  if constexpr (ROWS > 1) multiply_rest<ROWS / 2, VECTORS, ADD>(rows, a, b, b_stride, c, c_stride, inner);
}

template <int VECTORS, bool ADD, class A, class N>
inline void multiply_columns(
    int64_t rows, int64_t inner, A a, const N* b, int64_t b_stride, float* c, int64_t c_stride) {
  int64_t m = 0;
  for (; m + TILE_ROWS <= rows; m += TILE_ROWS)
    multiply_tile<TILE_ROWS, VECTORS, ADD>(a.from_row(m), b, b_stride, c + m * c_stride, c_stride, inner);
  multiply_rest<4, VECTORS, ADD>(rows - m, a.from_row(m), b, b_stride, c + m * c_stride, c_stride, inner);
}

template <bool ADD, class A, class N>
inline void multiply_part(
    int64_t rows, int64_t columns, int64_t inner, A a, const N* b, int64_t b_stride, float* c, int64_t c_stride) {
  constexpr int64_t WIDTH = TILE_VECTORS * LANES;
  int64_t n = 0;
  for (; n + WIDTH <= columns; n += WIDTH)
    multiply_columns<TILE_VECTORS, ADD>(rows, inner, a, b + n, b_stride, c + n, c_stride);
  for (; n < columns; n += LANES) multiply_columns<1, ADD>(rows, inner, a, b + n, b_stride, c + n, c_stride);
}

// C [rows, columns] = (or with ADD +=) A [rows, inner] B [inner, columns], with columns a multiple of LANES. Parts of A and B
// stay in the first-level cache; more parts round less, too.
template <bool ADD, class A, class N>
inline void multiply(
    int64_t rows, int64_t columns, int64_t inner, A a, const N* b, int64_t b_stride, float* c, int64_t c_stride) {
  constexpr int64_t PART = 64, PART_ROWS = 48;
  for (int64_t m = 0; m < rows; m += PART_ROWS) {
    const int64_t count = std::min(PART_ROWS, rows - m);
    const A from = a.from_row(m);
    float* to = c + m * c_stride;
    multiply_part<ADD>(count, columns, std::min(PART, inner), from, b, b_stride, to, c_stride);
    for (int64_t k = PART; k < inner; k += PART) {
      const N* rest = b + k * b_stride;
      multiply_part<true>(count, columns, std::min(PART, inner - k), from.from_column(k), rest, b_stride, to, c_stride);
    }
  }
}

}  // namespace hf_qknorm
