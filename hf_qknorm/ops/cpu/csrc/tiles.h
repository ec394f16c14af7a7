// The tiles of a block: heads as fp32 factors of products, and scores as logits.
#pragma once

#include <atomic>

#include <ATen/Parallel.h>

#include "problem.h"
#include "product.h"

namespace hf_qknorm {

// Rows of a block of heads from row `first` on, in fp32, times a factor: [count, width], zeros in place of what is not there.
template <class T>
void load_rows(const Problem& problem, const Heads& heads, const Rows& rows, int64_t first, int64_t count, double factor,
               float* to) {
  const int64_t head_dim = problem.head_dim, width = padded(head_dim);
  for (int64_t r = first; r < first + count; ++r, to += width) {
    const int64_t loaded = r < rows.count ? head_dim : 0;
    if (loaded) widen(heads.at<const T>(rows.b, rows.head(r), rows.query(r)), to, head_dim);
    if (factor != 1.0)
      for (int64_t d = 0; d < loaded; ++d) to[d] = static_cast<float>(factor * to[d]);
    std::fill(to + loaded, to + width, 0.0f);
  }
}

// Rows of a block of heads, times a factor, as columns: to[d·BLOCK_ROWS + r]. `staged` [LANES, width] is scratch.
template <class T>
void load_columns(const Problem& problem, const Heads& heads, const Rows& rows, double factor, float* staged, float* to) {
  const int64_t width = padded(problem.head_dim);
  for (int64_t r = 0; r < rows.width; r += LANES) {
    load_rows<T>(problem, heads, rows, r, LANES, factor, staged);
    transpose(staged, width, LANES, width, to + r, BLOCK_ROWS);
  }
}

// Keys or values of a tile [count, width] in fp32: where they lie, or a copy of them, with zeros behind the head's columns.
template <class T>
ByRow load_tile(const Heads& heads, int64_t b, int64_t head, int64_t first, int64_t count, int64_t head_dim,
                int64_t width, float* copy) {
  const T* from = heads.at<const T>(b, head, first);
  if constexpr (std::is_same_v<T, float>)
    if (width == head_dim) return {from, heads.row};
  for (int64_t j = 0; j < count; ++j) {
    widen(from + j * heads.row, copy + j * width, head_dim);
    std::fill(copy + j * width + head_dim, copy + (j + 1) * width, 0.0f);
  }
  return {copy, width};
}

enum class Cap { none, small, any };  // small: all arguments of tanh are within SMALL

// The logits over the cap, of products with `query_factor`; without a cap the logits
template <Cap CAP, int COUNT>
inline Vecs<COUNT> squashed(const Vecs<COUNT>& x) {
  if constexpr (CAP == Cap::none) return x;
  if constexpr (CAP == Cap::small) return tanh_small(x);
  return Vecs<COUNT>::of([&](int i) { return x[i].tanh(); });
}

// The logit of a squashed score
template <Cap CAP>
inline Vec logit(Vec squashed, Vec cap) {
  return CAP == Cap::none ? squashed : cap * squashed;
}

// logit - shift, rounded once. All passes round alike, so that the weights of backward add up to 1.
template <Cap CAP>
inline Vec exponent(Vec squashed, Vec cap, Vec shift) {
  return CAP == Cap::none ? squashed - shift : at::vec::fmsub(cap, squashed, shift);
}

// Call run(cap), a constant: how tanh is computed for scores [count, width] in rows of `stride`. NaN does not count: both
// formulas return NaN.
template <class Run>
void with_cap(const Problem& problem, const float* scores, int64_t stride, int64_t count, int64_t width, const Run& run) {
  if (!problem.cap) return run(std::integral_constant<Cap, Cap::none>());
  Vec largest(0.0f);
  for (int64_t j = 0; j < count; ++j)
    for (int64_t lane = 0; lane < width; lane += LANES)
      largest = at::vec::clamp_min(largest, Vec::loadu(scores + j * stride + lane).abs());
  const auto larger = [](const Vec& a, const Vec& b) { return at::vec::clamp_min(a, b); };
  if (at::vec::vec_reduce_all<float>(larger, largest) <= SMALL) return run(std::integral_constant<Cap, Cap::small>());
  run(std::integral_constant<Cap, Cap::any>());
}

constexpr int SIDE_BY_SIDE = 4;

// Call take(j, count) for the steps from j on, of which `count`, a constant, are taken side by side.
template <class Take>
inline void by_steps(int64_t steps, const Take& take) {
  int64_t j = 0;
  for (; j + SIDE_BY_SIDE <= steps; j += SIDE_BY_SIDE) take(j, std::integral_constant<int, SIDE_BY_SIDE>());
  for (; j < steps; ++j) take(j, std::integral_constant<int, 1>());
}

template <int COUNT>
inline Vecs<COUNT> load_steps(const float* from, int64_t stride) {
  return Vecs<COUNT>::of([&](int i) { return Vec::loadu(from + i * stride); });
}

template <int COUNT>
inline void store_steps(const Vecs<COUNT>& x, float* to, int64_t stride) {
  for (int i = 0; i < COUNT; ++i) x[i].store(to + i * stride);
}

// Run work(item, memory) for all items. A thread takes the next item when it is free, so that a slow one takes fewer.
template <class Work>
void share_out(int64_t items, int64_t threads, int64_t memory, Work work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(items, threads), 1, [&](int64_t, int64_t) {
    const Scratch scratch(memory);
    for (int64_t item = next++; item < items; item = next++) work(item, scratch.data());
  });
}

// Run work(rows, memory) for all blocks of rows, those that see the most keys first.
template <class Work>
void each_block(const Problem& problem, int64_t memory, Work work) {
  const Blocks blocks(problem);
  const int64_t per_key_head = blocks.per_key_head(), items = problem.batch * problem.key_heads * per_key_head;
  share_out(items, at::get_num_threads(), memory, [&](int64_t item, float* memory) {
    const int64_t place = item / per_key_head, part = per_key_head - 1 - item % per_key_head;
    work(Rows(problem, blocks, place / problem.key_heads, place % problem.key_heads, part), memory);
  });
}

}  // namespace hf_qknorm
