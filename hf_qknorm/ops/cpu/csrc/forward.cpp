#include "attention.h"
#include "pairs.h"
#include "softmax.h"

namespace hf_qknorm {
namespace {

constexpr int64_t TILE_KEYS = 256;

// The parts of a thread's memory. Rows of heads are padded to whole vectors.
struct Memory {
  int64_t width;                  // of a row of heads
  float *staged, *queries, *out;    // [LANES, width], [width, BLOCK_ROWS]
  float *scores, *keys, *values;  // [TILE_KEYS, BLOCK_ROWS], [TILE_KEYS, head_dim]
  Pairs pairs;  // of keys or values [TILE_KEYS / 2, width], of queries or weights [width / 2 or TILE_KEYS / 2, BLOCK_ROWS]

  static int64_t size(int64_t head_dim) {
    const int64_t width = padded(head_dim), pairs = TILE_KEYS / 2 * width + std::max(TILE_KEYS, width) / 2 * BLOCK_ROWS;
    return (LANES + 2 * BLOCK_ROWS) * width + TILE_KEYS * (BLOCK_ROWS + 2 * head_dim) + pairs;
  }
  Memory(float* start, int64_t head_dim) : width(padded(head_dim)) {
    staged = start;
    queries = staged + LANES * width;
    out = queries + BLOCK_ROWS * width;
    scores = out + BLOCK_ROWS * width;
    keys = scores + BLOCK_ROWS * TILE_KEYS;
    values = keys + TILE_KEYS * head_dim;
    pairs.left = reinterpret_cast<Pair*>(values + TILE_KEYS * head_dim);
    pairs.right = pairs.left + TILE_KEYS / 2 * width;
  }
};

// Divide the sums [width, BLOCK_ROWS] by the totals and write them with the normalisers.
template <class T>
void write(const Problem& problem, const Rows& rows, const Softmax& softmax, const Memory& memory, const Heads& out,
           float* normaliser) {
  for (int64_t r = 0; r < rows.count; ++r) {
    if (r % LANES == 0) transpose(memory.out + r, BLOCK_ROWS, memory.width, LANES, memory.staged, memory.width);
    const float inverse = rows.empty(r) ? 0.0f : 1.0f / softmax.total[r];
    float* row = memory.staged + r % LANES * memory.width;
    for (int64_t d = 0; d < problem.head_dim; ++d) row[d] = rows.empty(r) ? 0.0f : row[d] * inverse;
    narrow(row, out.at<T>(rows.b, rows.head(r), rows.query(r)), problem.head_dim);
    if (!normaliser) continue;
    float* pair = normaliser + 2 * ((rows.b * problem.heads + rows.head(r)) * problem.queries + rows.query(r));
    pair[0] = softmax.shift[r], pair[1] = inverse;
  }
}

template <class T>
void attend(const Problem& problem, const Rows& rows, const Memory& memory, const Heads& out, float* normaliser) {
  const int64_t head_dim = problem.head_dim;
  const Dropout dropout(problem.dropout);
  Softmax softmax(problem, rows);
  load_queries<T>(problem, rows, memory.staged, memory.queries);
  std::fill(memory.out, memory.out + memory.width * BLOCK_ROWS, 0.0f);
  for (int64_t first = rows.first_key; first < rows.last_key; first += TILE_KEYS) {
    const int64_t count = std::min(TILE_KEYS, rows.last_key - first);
    const auto load = [&](const Heads& heads, float* copy) {
      return load_tile<T>(heads, rows.b, rows.key_head, first, count, head_dim, head_dim, copy);
    };
    const ByRow keys = load(problem.k, memory.keys), values = load(problem.v, memory.values);
    score_heads<T>(problem, rows, count, keys, memory.queries, memory.scores, memory.pairs);
    weigh(problem, rows, {memory.scores, BLOCK_ROWS, first, count, problem.dropout > 0 ? &dropout : nullptr}, softmax);
    if (!problem.bounded() && first > rows.first_key)
      for (int64_t d = 0; d < head_dim; ++d)
        for (int64_t lane = 0; lane < rows.width; lane += LANES) {
          float* sums = memory.out + d * BLOCK_ROWS + lane;
          (Vec::loadu(sums) * Vec::loadu(softmax.rescale + lane)).store(sums);
        }
    const ByColumn transposed{values.data, values.stride};
    multiply_heads<T, true>(
        head_dim, rows.width, count, transposed, memory.scores, BLOCK_ROWS, memory.out, BLOCK_ROWS, memory.pairs);
  }
  write<T>(problem, rows, softmax, memory, out, normaliser);
}

}  // namespace

void forward(const Problem& problem, const Heads& out, float* normaliser) {
  with_dtype(problem.dtype, [&](auto zero) {
    each_block(problem, Memory::size(problem.head_dim), [&](const Rows& rows, float* memory) {
      attend<decltype(zero)>(problem, rows, Memory(memory, problem.head_dim), out, normaliser);
    });
  });
}

}  // namespace hf_qknorm
