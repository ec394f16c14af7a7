// The softmax of a tile of scores, with the state of the tiles before.
#pragma once

#include "tiles.h"

namespace hf_qknorm {

// The state of the softmax of each lane.
struct Softmax {
  alignas(64) float shift[BLOCK_ROWS];   // subtracted from logits
  alignas(64) float total[BLOCK_ROWS];   // sum of e^(logit - shift)
  alignas(64) float rescale[BLOCK_ROWS]; // factor of earlier sums, after a tile with larger logits

  // Where the keys are cut into parts, the first part alone has the sinks.
  Softmax(const Problem& problem, const Rows& rows, bool with_sinks = true) {
    for (int64_t lane = 0; lane < rows.width; ++lane) {
      const int64_t r = rows.row(lane);
      shift[lane] = problem.bounded() ? 0.0f : -FLT_MAX;
      total[lane] = 0;
      if (problem.sinks && with_sinks && r < rows.count) {
        const float sink = problem.sinks[rows.head(r)];
        shift[lane] = sink < shift[lane] ? shift[lane] : sink;
        if (lane == r) total[lane] = std::exp(sink - shift[lane]);
      }
    }
  }

  // Give all lanes of a row the largest of their shifts.
  void share_shifts(const Rows& rows) {
    for (int64_t lane = rows.width / rows.step; lane < rows.width; ++lane)
      if (float& first = shift[rows.row(lane)]; shift[lane] > first) first = shift[lane];
    for (int64_t lane = rows.width / rows.step; lane < rows.width; ++lane) shift[lane] = shift[rows.row(lane)];
  }

  // Add up the totals of a row's lanes in its first lane.
  void add_totals(const Rows& rows) {
    for (int64_t lane = rows.width / rows.step; lane < rows.width; ++lane) total[rows.row(lane)] += total[lane];
  }
};

struct Tile {
  float* scores;         // [steps, rows.width]
  int64_t stride;        // from step to step
  int64_t first, steps;  // the first key, and the number of steps, each of `rows.step` keys
  const Dropout* dropout;
};

// Replace scores by squashed ones, hidden ones by -inf, and raise the shift of each row to its largest logit.
template <Cap CAP>
void raise_shift(const Rows& rows, const Tile& tile, Vec cap, Softmax& softmax) {
  const Vec hidden(-INFINITY);
  for (int64_t lane = 0; lane < rows.width; lane += LANES) {
    const Vec before = Vec::loadu(softmax.shift + lane);
    Vec largest = before;
    by_steps(tile.steps, [&](int64_t j, auto count) {
      float* score = tile.scores + j * tile.stride + lane;
      const int64_t key = tile.first + j * rows.step;
      auto x = squashed<CAP>(load_steps<count>(score, tile.stride));
      if (!rows.shared(key, count))
        x = Vecs<count>::of([&](int i) { return Vec::blendv(hidden, x[i], rows.sees(lane, key + i * rows.step)); });
      for (int i = 0; i < count; ++i) largest = at::vec::clamp_min(largest, logit<CAP>(x[i], cap));
      store_steps(x, score, tile.stride);
    });
    largest.store(softmax.shift + lane);
    if (rows.step > 1) {
      softmax.share_shifts(rows);
      largest = Vec::loadu(softmax.shift + lane);
    }
    exp(before - largest).store(softmax.rescale + lane);
  }
}

// Replace scores, which are squashed if not BOUNDED, by weights e^(logit - shift), with dropout, and add the weights
// without dropout to the totals.
template <Cap CAP, bool BOUNDED>
void weigh(const Rows& rows, const Tile& tile, Vec cap, Softmax& softmax) {
  for (int64_t lane = 0; lane < rows.width; lane += LANES) {
    const Vec shift = Vec::loadu(softmax.shift + lane);
    auto sums = Vecs<SIDE_BY_SIDE>::of([](int) { return Vec(0.0f); });  // shorter sums round less
    by_steps(tile.steps, [&](int64_t j, auto count) {
      using Each = Vecs<count>;
      float* score = tile.scores + j * tile.stride + lane;
      const int64_t key = tile.first + j * rows.step;
      auto x = load_steps<count>(score, tile.stride);
      if constexpr (BOUNDED) x = squashed<CAP>(x);
      auto weight = exp(Each::of([&](int i) { return BOUNDED ? logit<CAP>(x[i], cap) : exponent<CAP>(x[i], cap, shift); }));
      if (!rows.shared(key, count))
        weight = Each::of([&](int i) { return Vec::blendv(Vec(0.0f), weight[i], rows.sees(lane, key + i * rows.step)); });
      for (int i = 0; i < count; ++i) sums[i] = sums[i] + weight[i];
      if (tile.dropout)
        weight = Each::of([&](int i) { return weight[i] * tile.dropout->factors(rows, lane, key + i * rows.step); });
      store_steps(weight, score, tile.stride);
    });
    Vec total = Vec::loadu(softmax.total + lane);
    if constexpr (!BOUNDED) total = total * Vec::loadu(softmax.rescale + lane);
    (total + ((sums[0] + sums[1]) + (sums[2] + sums[3]))).store(softmax.total + lane);
  }
}

inline void weigh(const Problem& problem, const Rows& rows, const Tile& tile, Softmax& softmax) {
  const Vec cap(static_cast<float>(problem.cap.value_or(1.0)));
  with_cap(problem, tile.scores, tile.stride, tile.steps, rows.width, [&](auto kind) {
    if (problem.bounded()) return weigh<kind, true>(rows, tile, cap, softmax);
    raise_shift<kind>(rows, tile, cap, softmax);
    weigh<kind, false>(rows, tile, cap, softmax);
  });
}

}  // namespace hf_qknorm
