#include "attention.h"
#include "tiles.h"

namespace hf_qknorm {
namespace {

constexpr int64_t TILE_KEYS = 256;

// The state of the softmax of each row.
struct Softmax {
  alignas(64) float shift[BLOCK_ROWS];   // what is subtracted from logits
  alignas(64) float total[BLOCK_ROWS];   // sum of e^(logit - shift)
  alignas(64) float rescale[BLOCK_ROWS]; // of earlier sums, after a tile with larger logits

  Softmax(const Problem& problem, const Rows& rows) {
    for (int64_t r = 0; r < rows.width; ++r) {
      shift[r] = problem.bounded() ? 0.0f : -FLT_MAX;
      total[r] = 0;
      if (problem.sinks && r < rows.count) {
        const float sink = problem.sinks[rows.head(r)];
        shift[r] = sink < shift[r] ? shift[r] : sink;
        total[r] = std::exp(sink - shift[r]);
      }
    }
  }
};

struct Tile {
  float* scores;  // [keys, BLOCK_ROWS]
  int64_t first, keys;
  const Dropout* dropout;
};

// Replace scores by logits, hidden ones by -inf, and raise the shift of each row to its largest logit.
template <Cap CAP>
void raise_shift(const Rows& rows, const Tile& tile, Vec cap, Softmax& softmax) {
  const Vec hidden(-INFINITY);
  for (int64_t lane = 0; lane < rows.width; lane += LANES) {
    const Vec before = Vec::loadu(softmax.shift + lane);
    Vec largest = before;
    for (int64_t j = 0; j < tile.keys; ++j) {
      float* score = tile.scores + j * BLOCK_ROWS + lane;
      Vec logit = capped<CAP>(Vec::loadu(score), cap);
      if (!rows.shared(tile.first + j)) logit = Vec::blendv(hidden, logit, rows.sees(lane, tile.first + j));
      largest = at::vec::clamp_min(largest, logit);
      logit.store(score);
    }
    largest.store(softmax.shift + lane);
    exp(before - largest).store(softmax.rescale + lane);
  }
}

// Replace scores by weights e^(logit - shift), with dropout, and add the weights without dropout to the totals.
template <Cap CAP, bool BOUNDED>
void weigh(const Rows& rows, const Tile& tile, Vec cap, Softmax& softmax) {
  for (int64_t lane = 0; lane < rows.width; lane += LANES) {
    const Vec shift = Vec::loadu(softmax.shift + lane);
    const auto weigh_key = [&](int64_t j) {
      float* score = tile.scores + j * BLOCK_ROWS + lane;
      Vec weight = BOUNDED ? exp(capped<CAP>(Vec::loadu(score), cap)) : exp(Vec::loadu(score) - shift);
      if (!rows.shared(tile.first + j)) weight = Vec::blendv(Vec(0.0f), weight, rows.sees(lane, tile.first + j));
      (tile.dropout ? weight * tile.dropout->factors(rows, lane, tile.first + j) : weight).store(score);
      return weight;
    };
    Vec sums[4] = {Vec(0.0f), Vec(0.0f), Vec(0.0f), Vec(0.0f)};  // shorter sums round less
    int64_t j = 0;
    for (; j + 4 <= tile.keys; j += 4)
      for (int i = 0; i < 4; ++i) sums[i] = sums[i] + weigh_key(j + i);
    for (; j < tile.keys; ++j) sums[0] = sums[0] + weigh_key(j);
    Vec total = Vec::loadu(softmax.total + lane);
    if constexpr (!BOUNDED) total = total * Vec::loadu(softmax.rescale + lane);
    (total + ((sums[0] + sums[1]) + (sums[2] + sums[3]))).store(softmax.total + lane);
  }
}

template <Cap CAP>
void weigh(const Problem& problem, const Rows& rows, const Tile& tile, Softmax& softmax) {
  const Vec cap(static_cast<float>(problem.cap.value_or(1.0)));
  if (problem.bounded()) return weigh<CAP, true>(rows, tile, cap, softmax);
  raise_shift<CAP>(rows, tile, cap, softmax);
  weigh<CAP, false>(rows, tile, cap, softmax);
}

void weigh(const Problem& problem, const Rows& rows, const Tile& tile, Softmax& softmax) {
  switch (cap_of(problem, tile.scores, tile.keys, rows.width)) {
    case Cap::none: return weigh<Cap::none>(problem, rows, tile, softmax);
    case Cap::small: return weigh<Cap::small>(problem, rows, tile, softmax);
    case Cap::any: return weigh<Cap::any>(problem, rows, tile, softmax);
  }
}

// Memory of a thread, by what lies there.
struct Memory {
  float *row, *queries, *out, *scores, *keys, *values;

  static int64_t size(int64_t head_dim) {
    return padded(head_dim) + BLOCK_ROWS * (2 * head_dim + TILE_KEYS) + 2 * TILE_KEYS * head_dim;
  }
  Memory(float* start, int64_t head_dim) {
    row = start;
    queries = row + padded(head_dim);
    out = queries + BLOCK_ROWS * head_dim;
    scores = out + BLOCK_ROWS * head_dim;
    keys = scores + BLOCK_ROWS * TILE_KEYS;
    values = keys + TILE_KEYS * head_dim;
  }
};

// Divide the sums [head_dim, BLOCK_ROWS] by the totals and write them with the normalisers.
template <class T>
void write(const Problem& problem, const Rows& rows, const Softmax& softmax, const Memory& memory, const Heads& out,
           float* normaliser) {
  for (int64_t r = 0; r < rows.count; ++r) {
    const float inverse = rows.empty(r) ? 0.0f : 1.0f / softmax.total[r];
    for (int64_t d = 0; d < problem.head_dim; ++d)
      memory.row[d] = rows.empty(r) ? 0.0f : memory.out[d * BLOCK_ROWS + r] * inverse;
    narrow(memory.row, out.at<T>(rows.b, rows.head(r), rows.query(r)), problem.head_dim);
    float* pair = normaliser + 2 * ((rows.b * problem.heads + rows.head(r)) * problem.queries + rows.query(r));
    pair[0] = softmax.shift[r], pair[1] = inverse;
  }
}

template <class T>
void attend(const Problem& problem, const Rows& rows, const Memory& memory, const Heads& out, float* normaliser) {
  const int64_t head_dim = problem.head_dim;
  const Dropout dropout(problem.dropout);
  Softmax softmax(problem, rows);
  load_columns<T>(problem, problem.q, rows, problem.query_factor(), memory.row, memory.queries);
  std::fill(memory.out, memory.out + head_dim * BLOCK_ROWS, 0.0f);
  for (int64_t first = rows.first_key; first < rows.last_key; first += TILE_KEYS) {
    const int64_t count = std::min(TILE_KEYS, rows.last_key - first);
    const ByRow keys = load_keys<T>(problem.k, rows, first, count, head_dim, memory.keys);
    const ByRow values = load_keys<T>(problem.v, rows, first, count, head_dim, memory.values);
    multiply<false>(count, rows.width, head_dim, keys, memory.queries, BLOCK_ROWS, memory.scores, BLOCK_ROWS);
    weigh(problem, rows, {memory.scores, first, count, problem.dropout > 0 ? &dropout : nullptr}, softmax);
    if (!problem.bounded() && first > rows.first_key)
      for (int64_t d = 0; d < head_dim; ++d)
        for (int64_t lane = 0; lane < rows.width; lane += LANES) {
          float* sums = memory.out + d * BLOCK_ROWS + lane;
          (Vec::loadu(sums) * Vec::loadu(softmax.rescale + lane)).store(sums);
        }
    const ByColumn transposed{values.data, values.stride};
    multiply<true>(head_dim, rows.width, count, transposed, memory.scores, BLOCK_ROWS, memory.out, BLOCK_ROWS);
  }
  write<T>(problem, rows, softmax, memory, out, normaliser);
}

template <class T>
void attend_all(const Problem& problem, const Heads& out, float* normaliser) {
  const Blocks blocks(problem);
  const int64_t per_key_head = blocks.per_key_head();
  const int64_t items = problem.batch * problem.key_heads * per_key_head;
  share_out(items, Memory::size(problem.head_dim), [&](int64_t item, float* memory) {
    const int64_t place = item / per_key_head, part = per_key_head - 1 - item % per_key_head;  // the longest first
    const Rows rows(problem, blocks, place / problem.key_heads, place % problem.key_heads, part);
    attend<T>(problem, rows, Memory(memory, problem.head_dim), out, normaliser);
  });
}

}  // namespace

void forward(const Problem& problem, const Heads& out, float* normaliser) {
  switch (problem.dtype) {
    case c10::ScalarType::BFloat16: return attend_all<c10::BFloat16>(problem, out, normaliser);
    case c10::ScalarType::Half: return attend_all<c10::Half>(problem, out, normaliser);
    default: return attend_all<float>(problem, out, normaliser);
  }
}

}  // namespace hf_qknorm
