// An attention problem, and how it is cut into blocks of rows.
//
// A row is a query of one query head. A block has the rows of some queries for some of the query heads that share a key
// head, so that keys and values are never repeated. Scores of a block are kept transposed, [keys, rows], so that
// the numbers of the rows (maxima, sums, ranges of keys) are vectors, and keys and values are read in place.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <optional>

#include "functions.h"

namespace hf_qknorm {

constexpr int64_t BLOCK_ROWS = 64;
constexpr float BOUND_WITHOUT_MAXIMUM = 64.0f;  // in nats: e^64 times any number of keys is finite in fp32

// A tensor [B, H, T, D] whose last axis is dense.
struct Heads {
  void* data;
  int64_t batch, head, row;  // strides, in numbers

  template <class T>
  T* at(int64_t b, int64_t h, int64_t t) const {
    return static_cast<T*>(data) + b * batch + h * head + t * row;
  }
};

struct Problem {
  c10::ScalarType dtype;
  Heads q, k, v;
  int64_t batch = 0, heads = 0, key_heads = 0, queries = 0, keys = 0, head_dim = 0;
  const int32_t* ranges = nullptr;  // [B or 1, T, 2], dense
  int64_t ranges_batch = 0;         // stride of the batch
  const float* sinks = nullptr;     // [H]
  double scale = 1;
  std::optional<double> cap = {};
  bool causal = false;
  std::optional<int64_t> window = {};
  double dropout = 0;
  uint64_t seed = 0;

  int64_t group() const { return heads / key_heads; }
  // The factor of queries that makes their products with keys logits, or with a cap the arguments of tanh.
  double query_factor() const { return cap ? scale / *cap : scale; }
  // Whether no logit can need a maximum to be subtracted before its exponential.
  bool bounded() const { return cap && *cap <= BOUND_WITHOUT_MAXIMUM && sinks == nullptr; }
};

// How the rows of each key head are cut into blocks.
struct Blocks {
  int64_t heads, head_parts;      // query heads of a block, at most; blocks beside each other
  int64_t queries, query_parts;   // queries of a block, at most; blocks one after the other
  int64_t per_key_head() const { return head_parts * query_parts; }

  explicit Blocks(const Problem& problem) {
    const int64_t group = problem.group();
    head_parts = (group + BLOCK_ROWS - 1) / BLOCK_ROWS;
    heads = (group + head_parts - 1) / head_parts;
    queries = BLOCK_ROWS / heads;
    query_parts = (problem.queries + queries - 1) / queries;
  }
};

// The rows of a block: row r is query first_query + r % queries of head first_head + r / queries.
//
// Scores are vectors of `width` lanes. As a rule lane r is row r, and each key has its own lanes. The lanes of packed rows
// hold several keys: lane l is row l % R of the key l / R places on, where R is the number of rows, padded.
struct Rows {
  int64_t b, key_head, first_head, first_query, queries, count;
  int64_t width;                             // count rounded up to whole vectors
  int64_t step = 1;                          // keys of `width` lanes
  int64_t first_key, last_key;               // no row sees keys before the first one, or from the last one on
  int64_t first_shared, last_shared;         // all rows see keys from the first one on, before the last one
  alignas(64) float start[BLOCK_ROWS];       // each lane sees keys from here on,
  alignas(64) float stop[BLOCK_ROWS];        // before here; packed lanes count from the first key of the step
  alignas(64) int32_t seed_low[BLOCK_ROWS];  // of dropout
  alignas(64) int32_t seed_high[BLOCK_ROWS];

  int64_t head(int64_t r) const { return first_head + r / queries; }
  int64_t query(int64_t r) const { return first_query + r % queries; }
  int64_t row(int64_t lane) const { return lane % (width / step); }
  bool empty(int64_t r) const { return start[r] >= stop[r]; }
  bool shared(int64_t key, int64_t steps = 1) const {
    return key >= first_shared && key + steps * step <= last_shared;
  }

  // Whether the lanes, from `lane` on, see their keys, the first of which is given, as a mask
  Vec sees(int64_t lane, int64_t key) const {
    const Vec number(static_cast<float>(key));
    return (Vec::loadu(start + lane) <= number) & (number < Vec::loadu(stop + lane));
  }

  // `part` counts the blocks of a key head, queries first.
  Rows(const Problem& problem, const Blocks& blocks, int64_t b, int64_t key_head, int64_t part)
      : b(b), key_head(key_head) {
    const int64_t head_part = part / blocks.query_parts;
    first_head = key_head * problem.group() + head_part * blocks.heads;
    first_query = part % blocks.query_parts * blocks.queries;
    queries = std::min(blocks.queries, problem.queries - first_query);
    const int64_t last_head = (key_head + 1) * problem.group();
    count = queries * std::min(blocks.heads, last_head - first_head);
    width = padded(count);
    find_keys(problem);
    if (problem.dropout > 0) find_seeds(problem);
  }

  // Pack `padded_rows` rows, at least `count`, a divisor of LANES; without dropout.
  void pack(int64_t padded_rows) {
    width = LANES, step = LANES / padded_rows;
    for (int64_t lane = padded_rows; lane < width; ++lane) {
      const int64_t later = lane / padded_rows;
      start[lane] = start[row(lane)] - static_cast<float>(later), stop[lane] = stop[row(lane)] - static_cast<float>(later);
    }
  }

 private:
  void find_keys(const Problem& problem) {
    first_key = problem.keys, last_key = 0, first_shared = 0, last_shared = problem.keys;
    for (int64_t r = 0; r < count; ++r) {
      const int64_t position = query(r) + problem.keys - problem.queries;
      int64_t from = 0, to = problem.keys;
      if (problem.window) from = std::max(from, position - *problem.window + problem.causal);
      if (problem.causal || problem.window) to = std::min(to, position + 1 + (problem.causal ? 0 : *problem.window));
      if (problem.ranges) {
        const int32_t* range = problem.ranges + b * problem.ranges_batch + 2 * query(r);
        from = std::max<int64_t>(from, range[0]);
        to = std::min<int64_t>(to, range[1]);
      }
      if (from >= to) from = to = 0;
      start[r] = static_cast<float>(from), stop[r] = static_cast<float>(to);
      if (from < to) first_key = std::min(first_key, from), last_key = std::max(last_key, to);
      first_shared = std::max(first_shared, from), last_shared = std::min(last_shared, to);
    }
    for (int64_t r = count; r < width; ++r) start[r] = stop[r] = 0;
    if (first_key > last_key) first_key = last_key = 0;
  }

  void find_seeds(const Problem& problem) {
    for (int64_t r = 0; r < width; ++r) {
      const uint64_t row = (uint64_t(b) * problem.heads + head(r)) * problem.queries + query(r);
      const uint64_t mixed = mix(problem.seed + mix(row));
      seed_low[r] = static_cast<int32_t>(mixed), seed_high[r] = static_cast<int32_t>(mixed >> 32);
    }
  }
};

// Dropout of the weights: 0 or 1 / (1 - rate), a function of seed, head, query and key alone.
class Dropout {
 public:
  explicit Dropout(double rate) {
    const double threshold = std::nearbyint(rate * 4294967296.0);
    threshold_ = static_cast<int32_t>(static_cast<uint32_t>(std::min(threshold, 4294967295.0)) ^ 0x80000000u);
    factor_ = static_cast<float>(1.0 / (1.0 - rate));
  }

  Vec factors(const Rows& rows, int64_t lane, int64_t key) const {
    IntVec drawn = mix(IntVec::loadu(rows.seed_low + lane) + IntVec(static_cast<int32_t>(key)));
    drawn = mix(drawn ^ IntVec::loadu(rows.seed_high + lane));
    const IntVec kept = (drawn ^ IntVec(INT32_MIN)) >= IntVec(threshold_);  // unsigned numbers, compared as signed ones
    return Vec::blendv(Vec(0.0f), Vec(factor_), at::vec::cast<float>(kept));
  }

 private:
  int32_t threshold_;
  float factor_;
};

}  // namespace hf_qknorm
