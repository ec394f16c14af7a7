// Products of heads of bf16 numbers by the CPU's own instructions, which add two products to a sum in fp32.
#pragma once

#include "tiles.h"

namespace hf_qknorm {

// Memory for the pairs of the left and the right factor of a product
struct Pairs {
  Pair *left, *right;
};

// Whether `multiply_heads` rounds both factors to the dtype of the heads, as the CPU multiplies bf16 numbers.
template <class T>
#if defined(__AVX512BF16__)
constexpr bool ROUNDED = std::is_same_v<T, c10::BFloat16>;
#else
constexpr bool ROUNDED = false;
#endif

#if defined(__AVX512BF16__)
// Two vectors of numbers, rounded to bf16, as a vector of pairs
inline __m512i paired(__m512 first, __m512 second) {
  const __m512i low = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(first)));
  const __m512i high = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(second)));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// from [inner, columns] as pairs of its rows [(inner + 1) / 2, padded(columns)], of an odd number the last with zeros
inline void pair_rows(const float* from, int64_t stride, int64_t inner, int64_t columns, Pair* to) {
  const int64_t width = padded(columns);
  for (int64_t k = 0; k < inner; k += 2, to += width)
    for (int64_t n = 0; n < columns; n += LANES) {
      const __mmask16 real = columns - n < LANES ? (1 << (columns - n)) - 1 : 0xffff;
      const float* first = from + k * stride + n;
      const __m512 second = _mm512_maskz_loadu_ps(k + 1 < inner ? real : __mmask16(0), first + stride);
      _mm512_storeu_si512(to + n, paired(_mm512_maskz_loadu_ps(real, first), second));
    }
}

// The pairs of a left factor [rows, inner], in memory `to`
inline RowsOf<Pair> pairs_of(const ByRow& from, int64_t rows, int64_t inner, Pair* to) {
  const int64_t width = padded(inner) / 2;
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t k = 0; k < inner; k += LANES) {
      const __mmask16 real = inner - k < LANES ? (1 << (inner - k)) - 1 : 0xffff;
      const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(real, from.data + m * from.stride + k));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + m * width + k / 2), reinterpret_cast<__m256i>(rounded));
    }
  return {to, width};
}

inline ColumnsOf<Pair> pairs_of(const ByColumn& from, int64_t rows, int64_t inner, Pair* to) {
  pair_rows(from.data, from.stride, inner, rows, to);
  return {to, padded(rows)};
}
#endif

// `multiply` of heads of dtype T
template <class T, bool ADD, class A>
inline void multiply_heads(int64_t rows, int64_t columns, int64_t inner, A a, const float* b, int64_t b_stride, float* c,
                           int64_t c_stride, const Pairs& pairs) {
#if defined(__AVX512BF16__)
  if constexpr (ROUNDED<T>) {
    pair_rows(b, b_stride, inner, columns, pairs.right);
    const auto left = pairs_of(a, rows, inner, pairs.left);
    return multiply<ADD>(rows, columns, (inner + 1) / 2, left, pairs.right, columns, c, c_stride);
  }
#endif
  multiply<ADD>(rows, columns, inner, a, b, b_stride, c, c_stride);
}

// Queries of a block as columns, for `score_heads`. `query_factor` times a rounded query would be rounded once more.
template <class T>
inline void load_queries(const Problem& problem, const Rows& rows, float* staged, float* to) {
  load_columns<T>(problem, problem.q, rows, ROUNDED<T> ? 1.0 : problem.query_factor(), staged, to);
}

// The scores [count, BLOCK_ROWS] of a tile of keys: products with queries and `query_factor`.
template <class T>
inline void score_heads(const Problem& problem, const Rows& rows, int64_t count, const ByRow& keys, const float* queries,
                        float* scores, const Pairs& pairs) {
  multiply_heads<T, false>(count, rows.width, problem.head_dim, keys, queries, BLOCK_ROWS, scores, BLOCK_ROWS, pairs);
  if constexpr (ROUNDED<T>)
    for (float* row = scores; row < scores + count * BLOCK_ROWS; row += BLOCK_ROWS)
      for (int64_t lane = 0; lane < rows.width; lane += LANES)
        (Vec(static_cast<float>(problem.query_factor())) * Vec::loadu(row + lane)).store(row + lane);
}

}  // namespace hf_qknorm
