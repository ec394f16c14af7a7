#include "attention.h"
#include "pairs.h"

namespace hf_qknorm {
namespace {

// Keys, values and their gradients of a tile stay in the second-level cache while all queries pass.
int64_t tile_keys(int64_t head_dim) { return std::clamp<int64_t>(16384 / head_dim / 32 * 32, 64, 256); }

// The normaliser and grad·out of each row.
struct RowNumbers {
  alignas(64) float shift[BLOCK_ROWS] = {};
  alignas(64) float inverse[BLOCK_ROWS] = {};
  alignas(64) float delta[BLOCK_ROWS] = {};

  RowNumbers(const Problem& problem, const Gradients& gradients, const Rows& rows) {
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t row = (rows.b * problem.heads + rows.head(r)) * problem.queries + rows.query(r);
      shift[r] = gradients.normaliser[2 * row], inverse[r] = gradients.normaliser[2 * row + 1];
      delta[r] = gradients.delta[row];
    }
  }
};

struct Tile {
  float *scores, *dweights;  // [keys, BLOCK_ROWS]
  int64_t first, keys;
  const Dropout* dropout;
};

// Replace scores by weights, with dropout, and gradients of weights by those of products q·k / scale.
template <Cap CAP>
void differentiate(const Rows& rows, const Tile& tile, Vec cap, const RowNumbers& numbers) {
  const Vec zero(0.0f), one(1.0f);
  for (int64_t lane = 0; lane < rows.width; lane += LANES) {
    const Vec shift = Vec::loadu(numbers.shift + lane), inverse = Vec::loadu(numbers.inverse + lane);
    const Vec delta = Vec::loadu(numbers.delta + lane);
    by_steps(tile.keys, [&](int64_t j, auto count) {
      using Each = Vecs<count>;
      float *score = tile.scores + j * BLOCK_ROWS + lane, *dweight = tile.dweights + j * BLOCK_ROWS + lane;
      const int64_t key = tile.first + j;
      const auto x = squashed<CAP>(load_steps<count>(score, BLOCK_ROWS));
      auto weight = exp(Each::of([&](int i) { return exponent<CAP>(x[i], cap, shift); }));
      weight = Each::of([&](int i) { return weight[i] * inverse; });
      auto dlogit = load_steps<count>(dweight, BLOCK_ROWS), kept = weight;
      if (tile.dropout) {
        const auto factors = Each::of([&](int i) { return tile.dropout->factors(rows, lane, key + i); });
        dlogit = Each::of([&](int i) { return dlogit[i] * factors[i]; });
        kept = Each::of([&](int i) { return kept[i] * factors[i]; });
      }
      dlogit = Each::of([&](int i) { return weight[i] * (dlogit[i] - delta); });
      if constexpr (CAP != Cap::none)
        dlogit = Each::of([&](int i) { return dlogit[i] * at::vec::fmadd(x[i].neg(), x[i], one); });
      if (!rows.shared(key, count))
        for (int i = 0; i < count; ++i) {
          const Vec seen = rows.sees(lane, key + i);
          kept[i] = Vec::blendv(zero, kept[i], seen);
          dlogit[i] = Vec::blendv(zero, dlogit[i], seen);
        }
      store_steps(kept, score, BLOCK_ROWS);
      store_steps(dlogit, dweight, BLOCK_ROWS);
    });
  }
}

void differentiate(const Problem& problem, const Rows& rows, const Tile& tile, const RowNumbers& numbers) {
  const Vec cap(static_cast<float>(problem.cap.value_or(1.0)));
  with_cap(problem, tile.scores, BLOCK_ROWS, tile.keys, rows.width,
           [&](auto kind) { differentiate<kind>(rows, tile, cap, numbers); });
}

// The parts of a thread's memory. Rows of heads are padded to whole vectors.
struct Memory {
  int64_t width;                              // of a row of heads
  float *staged, *query_columns, *grad_columns; // [LANES, width], [width, BLOCK_ROWS]
  float *query_rows, *grad_rows, *dqueries;   // [BLOCK_ROWS, width]
  float *scores, *dweights;                   // [tile, BLOCK_ROWS]
  float *keys, *values, *dkeys, *dvalues;     // [tile, width]
  Pairs pairs;  // of both factors of a product: at most [tile / 2, width or BLOCK_ROWS], and [tile / 2, width]

  static int64_t size(int64_t head_dim) {
    const int64_t width = padded(head_dim), tile = tile_keys(head_dim);
    const int64_t pairs = tile / 2 * std::max(width, BLOCK_ROWS) + tile / 2 * width;
    return (LANES + 5 * BLOCK_ROWS + 4 * tile) * width + 2 * tile * BLOCK_ROWS + pairs;
  }
  Memory(float* start, int64_t head_dim) : width(padded(head_dim)) {
    const int64_t tile = tile_keys(head_dim);
    staged = start;
    query_columns = staged + LANES * width;
    grad_columns = query_columns + BLOCK_ROWS * width;
    query_rows = grad_columns + BLOCK_ROWS * width;
    grad_rows = query_rows + BLOCK_ROWS * width;
    dqueries = grad_rows + BLOCK_ROWS * width;
    scores = dqueries + BLOCK_ROWS * width;
    dweights = scores + BLOCK_ROWS * tile;
    keys = dweights + BLOCK_ROWS * tile;
    values = keys + tile * width;
    dkeys = values + tile * width;
    dvalues = dkeys + tile * width;
    pairs.left = reinterpret_cast<Pair*>(dvalues + tile * width);
    pairs.right = pairs.left + tile / 2 * std::max(width, BLOCK_ROWS);
  }
};

// Add the gradients of a block of rows and the keys of a tile: of queries to `dq`, of keys and values to memory, from its
// row `offset` on.
template <class T>
void add_block(const Problem& problem, const Gradients& gradients, const Rows& rows, const Memory& memory,
               const ByRow& keys, const ByRow& values, Tile tile, int64_t offset, float* dq) {
  const int64_t head_dim = problem.head_dim, width = memory.width;
  load_queries<T>(problem, rows, memory.staged, memory.query_columns);
  load_columns<T>(problem, gradients.grad, rows, 1.0, memory.staged, memory.grad_columns);
  load_rows<T>(problem, problem.q, rows, 0, rows.count, 1.0, memory.query_rows);
  load_rows<T>(problem, gradients.grad, rows, 0, rows.count, 1.0, memory.grad_rows);
  const Pairs& pairs = memory.pairs;
  score_heads<T>(problem, rows, tile.keys, keys, memory.query_columns, tile.scores, pairs);
  multiply_heads<T, false>(
      tile.keys, rows.width, head_dim, values, memory.grad_columns, BLOCK_ROWS, tile.dweights, BLOCK_ROWS, pairs);
  differentiate(problem, rows, tile, RowNumbers(problem, gradients, rows));
  const ByRow weights{tile.scores, BLOCK_ROWS}, dlogits{tile.dweights, BLOCK_ROWS};
  float *dvalues = memory.dvalues + offset * width, *dkeys = memory.dkeys + offset * width;
  multiply_heads<T, true>(tile.keys, width, rows.count, weights, memory.grad_rows, width, dvalues, width, pairs);
  multiply_heads<T, true>(tile.keys, width, rows.count, dlogits, memory.query_rows, width, dkeys, width, pairs);
  const ByColumn transposed{tile.dweights, BLOCK_ROWS};
  multiply_heads<T, false>(
      rows.count, width, tile.keys, transposed, keys.data, keys.stride, memory.dqueries, width, pairs);
  const float scale = static_cast<float>(problem.scale);
  for (int64_t r = 0; r < rows.count; ++r) {
    float* to = dq + ((rows.b * problem.heads + rows.head(r)) * problem.queries + rows.query(r)) * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) to[d] += scale * memory.dqueries[r * width + d];
  }
}

// Write [count, width] times a factor to the gradient of keys or values.
template <class T>
void write_tile(const Heads& heads, int64_t b, int64_t head, int64_t first, int64_t count, int64_t head_dim,
                double factor, const Memory& memory, const float* from) {
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t d = 0; d < head_dim; ++d) memory.staged[d] = static_cast<float>(factor) * from[j * memory.width + d];
    narrow(memory.staged, heads.at<T>(b, head, first + j), head_dim);
  }
}

// All gradients of the keys from `begin` to `end` of a key head.
template <class T>
void differentiate_keys(const Problem& problem, const Gradients& gradients, const Blocks& blocks, int64_t b,
                        int64_t key_head, int64_t begin, int64_t end, const Memory& memory, float* dq) {
  const int64_t head_dim = problem.head_dim, width = memory.width, step = tile_keys(head_dim);
  const Dropout dropout(problem.dropout);
  for (int64_t first = begin; first < end; first += step) {
    const int64_t count = std::min(step, end - first);
    const ByRow keys = load_tile<T>(problem.k, b, key_head, first, count, head_dim, width, memory.keys);
    const ByRow values = load_tile<T>(problem.v, b, key_head, first, count, head_dim, width, memory.values);
    std::fill(memory.dkeys, memory.dkeys + count * width, 0.0f);
    std::fill(memory.dvalues, memory.dvalues + count * width, 0.0f);
    for (int64_t part = 0; part < blocks.per_key_head(); ++part) {
      const Rows rows(problem, blocks, b, key_head, part);
      const int64_t from = std::max(first, rows.first_key), to = std::min(first + count, rows.last_key);
      if (from >= to) continue;
      const int64_t offset = from - first;
      const Tile tile{memory.scores, memory.dweights, from, to - from, problem.dropout > 0 ? &dropout : nullptr};
      add_block<T>(problem, gradients, rows, memory, keys.from_row(offset), values.from_row(offset), tile, offset, dq);
    }
    write_tile<T>(gradients.dk, b, key_head, first, count, head_dim, problem.scale, memory, memory.dkeys);
    write_tile<T>(gradients.dv, b, key_head, first, count, head_dim, 1.0, memory, memory.dvalues);
  }
}

// delta = grad·out of every row, rounded once: where a weight is near 1, it nearly cancels the gradient of the weight.
template <class T>
void find_deltas(const Problem& problem, const Gradients& gradients, const Rows& rows, const Memory& memory) {
  constexpr int64_t SUMS = 8;
  load_rows<T>(problem, gradients.grad, rows, 0, rows.count, 1.0, memory.grad_rows);
  load_rows<T>(problem, gradients.out, rows, 0, rows.count, 1.0, memory.query_rows);
  for (int64_t r = 0; r < rows.count; ++r) {
    const float *grad = memory.grad_rows + r * memory.width, *out = memory.query_rows + r * memory.width;
    double sums[SUMS] = {};
    for (int64_t d = 0; d < memory.width; d += SUMS)
      for (int64_t i = 0; i < SUMS; ++i) sums[i] += static_cast<double>(grad[d + i]) * out[d + i];
    double delta = 0;
    for (double sum : sums) delta += sum;
    gradients.delta[(rows.b * problem.heads + rows.head(r)) * problem.queries + rows.query(r)] = static_cast<float>(delta);
  }
}

template <class T>
void differentiate_all(const Problem& problem, const Gradients& gradients) {
  const Blocks blocks(problem);
  const int64_t places = problem.batch * problem.key_heads, step = tile_keys(problem.head_dim);
  each_block(problem, Memory::size(problem.head_dim), [&](const Rows& rows, float* memory) {
    find_deltas<T>(problem, gradients, rows, Memory(memory, problem.head_dim));
  });
  const int64_t tiles = (problem.keys + step - 1) / step;
  const int64_t size = problem.batch * problem.heads * problem.queries * problem.head_dim;
  share_out(places * gradients.parts, at::get_num_threads(), Memory::size(problem.head_dim), [&](int64_t item, float* memory) {
    const int64_t part = item / places, place = item % places;  // the first keys, which most queries see, first
    const int64_t begin = part * tiles / gradients.parts * step;
    const int64_t end = std::min((part + 1) * tiles / gradients.parts * step, problem.keys);
    differentiate_keys<T>(problem, gradients, blocks, place / problem.key_heads, place % problem.key_heads, begin, end,
                          Memory(memory, problem.head_dim), gradients.dq + part * size);
  });
}

}  // namespace

void backward(const Problem& problem, const Gradients& gradients) {
  with_dtype(problem.dtype, [&](auto zero) { differentiate_all<decltype(zero)>(problem, gradients); });
}

}  // namespace hf_qknorm
