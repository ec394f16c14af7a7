#include "attention.h"
#include "softmax.h"

namespace hf_qknorm {
namespace {

constexpr int64_t TILE_KEYS = 256;

// The measurements of each row of a block.
struct Measured {
  alignas(64) float largest[BLOCK_ROWS] = {};    // |scale·q·k|; NaN if one is NaN
  alignas(64) float over_half[BLOCK_ROWS] = {};  // keys with |scale·q·k| over half the threshold
  alignas(64) float over[BLOCK_ROWS] = {};       // keys with |scale·q·k| over the threshold
  alignas(64) float surprise[BLOCK_ROWS] = {};   // sum of e^(logit - shift)·(logit - shift)
};

// Compare the sizes of scores with the threshold. `unit` times a score is scale·q·k.
void compare(const Rows& rows, const Tile& tile, Vec unit, Vec threshold, Measured& measured) {
  const Vec zero(0.0f), one(1.0f), half = threshold * Vec(0.5f);
  for (int64_t lane = 0; lane < rows.width; lane += LANES) {
    Vec largest = Vec::loadu(measured.largest + lane);
    Vec over_half = Vec::loadu(measured.over_half + lane), over = Vec::loadu(measured.over + lane);
    for (int64_t j = 0; j < tile.steps; ++j) {
      Vec size = (unit * Vec::loadu(tile.scores + j * tile.stride + lane)).abs();
      if (!rows.shared(tile.first + j)) size = Vec::blendv(zero, size, rows.sees(lane, tile.first + j));
      largest = at::vec::maximum(largest, size);
      over_half = over_half + Vec::blendv(zero, one, size > half);
      over = over + Vec::blendv(zero, one, size > threshold);
    }
    largest.store(measured.largest + lane);
    over_half.store(measured.over_half + lane);
    over.store(measured.over + lane);
  }
}

// Add the keys of a tile to the totals and to the surprise.
template <Cap CAP>
void add_surprise(const Rows& rows, const Tile& tile, Vec cap, Softmax& softmax, Measured& measured) {
  const Vec zero(0.0f);
  alignas(64) float before[BLOCK_ROWS];
  std::copy(softmax.shift, softmax.shift + rows.width, before);
  raise_shift<CAP>(rows, tile, cap, softmax);
  for (int64_t lane = 0; lane < rows.width; lane += LANES) {
    const Vec shift = Vec::loadu(softmax.shift + lane), rescale = Vec::loadu(softmax.rescale + lane);
    Vec total = Vec::loadu(softmax.total + lane), surprise = Vec::loadu(measured.surprise + lane);
    const Vec moved = (surprise + total * (Vec::loadu(before + lane) - shift)) * rescale;
    surprise = Vec::blendv(zero, moved, total > zero);  // the first shift may be infinitely far away
    Vec new_total = zero, new_surprise = zero;
    for (int64_t j = 0; j < tile.steps; ++j) {
      const Vec difference = logit<CAP>(Vec::loadu(tile.scores + j * tile.stride + lane), cap) - shift;
      const Vec weight = exp(difference);
      new_total = new_total + weight;
      new_surprise = new_surprise + Vec::blendv(weight * difference, zero, difference < Vec(-87.0f));  // 0·log 0 is 0
    }
    (total * rescale + new_total).store(softmax.total + lane);
    (surprise + new_surprise).store(measured.surprise + lane);
  }
}

// Measure the rows of a block, and write the numbers of those that see a key.
template <class T>
void measure(const Problem& problem, const Rows& rows, double threshold, float* memory, RowStatistics* results) {
  const int64_t head_dim = problem.head_dim, width = padded(head_dim);
  float *staged = memory, *queries = staged + LANES * width, *scores = queries + BLOCK_ROWS * width;
  float* copy = scores + BLOCK_ROWS * TILE_KEYS;
  const Vec unit(static_cast<float>(problem.cap.value_or(1.0))), limit(static_cast<float>(threshold));
  Measured measured;
  Softmax softmax(problem, rows);
  if (problem.bounded()) std::fill(softmax.shift, softmax.shift + BLOCK_ROWS, -FLT_MAX);  // differences round less
  load_columns<T>(problem, problem.q, rows, problem.query_factor(), staged, queries);
  for (int64_t first = rows.first_key; first < rows.last_key; first += TILE_KEYS) {
    const int64_t count = std::min(TILE_KEYS, rows.last_key - first);
    const ByRow keys = load_tile<T>(problem.k, rows.b, rows.key_head, first, count, head_dim, head_dim, copy);
    multiply<false>(count, rows.width, head_dim, keys, queries, BLOCK_ROWS, scores, BLOCK_ROWS);
    const Tile tile{scores, BLOCK_ROWS, first, count, nullptr};
    compare(rows, tile, unit, limit, measured);
    with_cap(problem, scores, BLOCK_ROWS, count, rows.width,
             [&](auto kind) { add_surprise<kind>(rows, tile, unit, softmax, measured); });
  }
  for (int64_t r = 0; r < rows.count; ++r) {
    if (rows.empty(r)) continue;
    const float entropy = std::log(softmax.total[r]) - measured.surprise[r] / softmax.total[r];
    results[(rows.b * problem.heads + rows.head(r)) * problem.queries + rows.query(r)] = {
        measured.largest[r], entropy, rows.stop[r] - rows.start[r], measured.over_half[r], measured.over[r]};
  }
}

}  // namespace

void measure(const Problem& problem, double threshold, RowStatistics* results) {
  const int64_t size = (LANES + BLOCK_ROWS) * padded(problem.head_dim) + TILE_KEYS * (BLOCK_ROWS + problem.head_dim);
  with_dtype(problem.dtype, [&](auto zero) {
    each_block(problem, size, [&](const Rows& rows, float* memory) {
      measure<decltype(zero)>(problem, rows, threshold, memory, results);
    });
  });
}

}  // namespace hf_qknorm
