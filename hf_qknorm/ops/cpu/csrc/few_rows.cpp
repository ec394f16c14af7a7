// Attention of few rows, as in a step of generation: one query for each of a few heads that share a key head.
//
// Reading keys and values takes most of the time: each is read once, as vectors of columns. A vector of scores holds all
// rows of several keys (`Rows::pack`). Where key heads are few, their keys are cut into parts for several threads.
#include "attention.h"
#include "softmax.h"

#include <vector>

namespace hf_qknorm {
namespace {

constexpr int64_t MOST_ROWS = LANES / 2;
constexpr int64_t TILE_KEYS = 256, PART_KEYS = 512;
constexpr int64_t NUMBERS_OF_A_THREAD = 1 << 17;  // of keys and values; fewer are read in less time than a thread takes to wake

// The sum of the numbers of each of the vectors, one in each lane.
template <int64_t COUNT>
inline Vec sums_of(const Vec* x) {
  if constexpr (COUNT == 1) {
    return x[0];
  } else {
    const auto [even, odd] = at::vec::deinterleave2(sums_of<COUNT / 2>(x), sums_of<COUNT / 2>(x + COUNT / 2));
    return even + odd;
  }
}

// Products of keys [count, width] with queries [ROWS, width]: scores [count, ROWS]. Scores beyond the last key, to the end
// of a vector, are those of the last key. COLUMNS vectors of a key are read together: memory is fastest in its own order.
template <int ROWS, int COLUMNS>
void score_columns(const ByRow& keys, int64_t count, const float* queries, int64_t width, float* scores) {
  constexpr int STEP = LANES / ROWS;
  for (int64_t j = 0; j < count; j += STEP) {
    const float* key[STEP];
    for (int i = 0; i < STEP; ++i) key[i] = keys.data + std::min(j + i, count - 1) * keys.stride;
    Vec sums[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) sums[i] = Vec(0.0f);
    for (int64_t d = 0; d < width; d += COLUMNS * LANES) {
      Vec query[ROWS][COLUMNS];
      for (int r = 0; r < ROWS; ++r)
        for (int n = 0; n < COLUMNS; ++n) query[r][n] = Vec::loadu(queries + r * width + d + n * LANES);
#pragma GCC unroll 16
      for (int i = 0; i < STEP; ++i)
#pragma GCC unroll 4
        for (int n = 0; n < COLUMNS; ++n) {
          const Vec columns = Vec::loadu(key[i] + d + n * LANES);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) sums[i * ROWS + r] = at::vec::fmadd(columns, query[r][n], sums[i * ROWS + r]);
        }
    }
    sums_of<LANES>(sums).store(scores + j * ROWS);
  }
}

template <int ROWS>
void score(const ByRow& keys, int64_t count, const float* queries, int64_t width, float* scores) {
  constexpr int COLUMNS = std::max(4 / ROWS, 1);
  if (width % (COLUMNS * LANES) == 0) return score_columns<ROWS, COLUMNS>(keys, count, queries, width, scores);
  score_columns<ROWS, 1>(keys, count, queries, width, scores);
}

constexpr int SUMS = LANES;  // vectors of sums that stay in registers, which are twice as many

// Add weights [count, ROWS] times columns [count, VECTORS·LANES] of values to sums [ROWS, VECTORS·LANES].
template <int ROWS, int VECTORS>
void add_columns(const float* values, int64_t stride, int64_t count, const float* weights, float* sums, int64_t width) {
  constexpr int CHAINS = std::max(SUMS / (ROWS * VECTORS), 1);  // an addition takes several cycles
  Vec chains[CHAINS][ROWS][VECTORS];
  for (int c = 0; c < CHAINS; ++c)
    for (int r = 0; r < ROWS; ++r)
      for (int n = 0; n < VECTORS; ++n) chains[c][r][n] = Vec(0.0f);
  const auto add = [&](int64_t j, int c) __attribute__((always_inline)) {
    Vec columns[VECTORS];
#pragma GCC unroll 4
    for (int n = 0; n < VECTORS; ++n) columns[n] = Vec::loadu(values + j * stride + n * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Vec weight(weights[j * ROWS + r]);
#pragma GCC unroll 4
      for (int n = 0; n < VECTORS; ++n) chains[c][r][n] = at::vec::fmadd(weight, columns[n], chains[c][r][n]);
    }
  };
  int64_t j = 0;
  for (; j + CHAINS <= count; j += CHAINS)
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; ++c) add(j + c, c);
  for (; j < count; ++j) add(j, 0);
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < VECTORS; ++n) {
      Vec sum = chains[0][r][n];
      for (int c = 1; c < CHAINS; ++c) sum = sum + chains[c][r][n];
      float* to = sums + r * width + n * LANES;
      (Vec::loadu(to) + sum).store(to);
    }
}

// Add weights [count, ROWS] times values [count, width] to sums [ROWS, width]. Shorter sums round less.
template <int ROWS>
void add_values(ByRow values, int64_t count, const float* weights, float* sums, int64_t width) {
  constexpr int VECTORS = std::min(SUMS / ROWS, 4);
  constexpr int64_t PART = 128;
  for (int64_t first = 0; first < count; first += PART, values = values.from_row(PART), weights += PART * ROWS) {
    const int64_t part = std::min(PART, count - first);
    int64_t d = 0;
    for (; d + VECTORS * LANES <= width; d += VECTORS * LANES)
      add_columns<ROWS, VECTORS>(values.data + d, values.stride, part, weights, sums + d, width);
    for (; d < width; d += LANES) add_columns<ROWS, 1>(values.data + d, values.stride, part, weights, sums + d, width);
  }
}

// The results of a part of the keys: for each of `rows` rows shift, total, and the sums [rows, width].
struct Part {
  int64_t rows, width;
  float *shift, *total, *sums;

  static int64_t size(int64_t rows, int64_t width) { return rows * (2 + width); }
  Part(float* start, int64_t rows, int64_t width, int64_t number)
      : rows(rows), width(width), shift(start + number * size(rows, width)), total(shift + rows), sums(total + rows) {}
};

struct Memory {
  float *queries, *scores, *keys, *values;  // [ROWS, width], [TILE_KEYS, ROWS], [TILE_KEYS, width]

  static int64_t size(int64_t width) { return MOST_ROWS * (width + TILE_KEYS) + 2 * TILE_KEYS * width; }
  Memory(float* start, int64_t width) {
    queries = start;
    scores = queries + MOST_ROWS * width;
    keys = scores + MOST_ROWS * TILE_KEYS;
    values = keys + TILE_KEYS * width;
  }
};

// Compute the scores of `count` keys from `first` on, and add the weighted values from `seen` on to the sums.
template <int ROWS, class T>
void take_tile(const Problem& problem, const Rows& rows, int64_t first, int64_t seen, int64_t count, const Memory& memory,
               Softmax& softmax, const Part& part) {
  const int64_t head_dim = problem.head_dim, width = part.width, hidden = seen - first;
  const ByRow keys = load_tile<T>(problem.k, rows.b, rows.key_head, first, count, head_dim, width, memory.keys);
  score<ROWS>(keys, count, memory.queries, width, memory.scores);
  weigh(problem, rows, {memory.scores, LANES, first, (count + rows.step - 1) / rows.step, nullptr}, softmax);
  if (!problem.bounded())
    for (int64_t r = 0; r < ROWS; ++r)
      for (int64_t d = 0; d < width; ++d) part.sums[r * width + d] *= softmax.rescale[r];
  const ByRow values =
      load_tile<T>(problem.v, rows.b, rows.key_head, seen, count - hidden, head_dim, width, memory.values);
  add_values<ROWS>(values, count - hidden, memory.scores + hidden * ROWS, part.sums, width);
}

// The rows' attention to the keys from `begin` to `end`, each a multiple of TILE_KEYS or the end of all keys.
template <int ROWS, class T>
void attend(const Problem& problem, Rows rows, int64_t begin, int64_t end, const Memory& memory, const Part& part) {
  rows.pack(ROWS);
  Softmax softmax(problem, rows, begin == 0);
  const int64_t width = part.width;
  std::fill(memory.queries, memory.queries + ROWS * width, 0.0f);
  for (int64_t r = 0; r < rows.count; ++r) {
    float* query = memory.queries + r * width;
    widen(problem.q.at<const T>(rows.b, rows.head(r), rows.query(r)), query, problem.head_dim);
    for (int64_t d = 0; d < problem.head_dim; ++d) query[d] = static_cast<float>(problem.query_factor() * query[d]);
  }
  std::fill(part.sums, part.sums + ROWS * width, 0.0f);
  begin = std::max(begin, rows.first_key), end = std::min(end, rows.last_key);
  for (int64_t first = begin / LANES * LANES; first < end; first += TILE_KEYS) {
    const int64_t count = std::min(TILE_KEYS, end - first);
    take_tile<ROWS, T>(problem, rows, first, std::max(first, begin), count, memory, softmax, part);
  }
  softmax.add_totals(rows);
  std::copy(softmax.shift, softmax.shift + ROWS, part.shift);
  std::copy(softmax.total, softmax.total + ROWS, part.total);
}

// Add up the parts in their order, and write the output. `sum` [width] is scratch.
template <class T>
void write(const Problem& problem, const Rows& rows, const Part* parts, int64_t count, float* sum, const Heads& out) {
  for (int64_t r = 0; r < rows.count; ++r) {
    float shift = parts[0].shift[r], total = 0;
    for (int64_t i = 1; i < count; ++i) shift = parts[i].shift[r] > shift ? parts[i].shift[r] : shift;
    std::fill(sum, sum + parts[0].width, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const float factor = std::exp(parts[i].shift[r] - shift);
      total += factor * parts[i].total[r];
      for (int64_t d = 0; d < parts[i].width; ++d) sum[d] += factor * parts[i].sums[r * parts[i].width + d];
    }
    const float inverse = rows.empty(r) ? 0.0f : 1.0f / total;
    for (int64_t d = 0; d < problem.head_dim; ++d) sum[d] = rows.empty(r) ? 0.0f : sum[d] * inverse;
    narrow(sum, out.at<T>(rows.b, rows.head(r), rows.query(r)), problem.head_dim);
  }
}

// The parts of the keys: as many as give each thread several pieces of work.
int64_t parts_of(const Problem& problem, int64_t threads) {
  const int64_t places = problem.batch * problem.key_heads;
  if (places % threads == 0 || places >= 4 * threads) return 1;
  return std::clamp<int64_t>(problem.keys / PART_KEYS, 1, (4 * threads + places - 1) / places);
}

template <int ROWS, class T>
void attend_all(const Problem& problem, const Heads& out) {
  const Blocks blocks(problem);
  const int64_t places = problem.batch * problem.key_heads, width = padded(problem.head_dim);
  const int64_t numbers = 2 * places * problem.keys * width / NUMBERS_OF_A_THREAD + 1;
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), numbers), parts = parts_of(problem, threads);
  const int64_t tiles = (problem.keys + TILE_KEYS - 1) / TILE_KEYS;
  const Scratch results(places * parts * Part::size(ROWS, width));
  const auto rows_of = [&](int64_t place) {
    return Rows(problem, blocks, place / problem.key_heads, place % problem.key_heads, 0);
  };
  // Each thread takes keys one after the other, which it has often just written to a cache.
  at::parallel_for(0, places * parts, (places * parts + threads - 1) / threads, [&](int64_t first, int64_t last) {
    const Scratch scratch(Memory::size(width));
    for (int64_t item = first; item < last; ++item) {
      const int64_t begin = item % parts * tiles / parts * TILE_KEYS, end = (item % parts + 1) * tiles / parts * TILE_KEYS;
      const Part part(results.data(), ROWS, width, item);
      attend<ROWS, T>(problem, rows_of(item / parts), begin, std::min(end, problem.keys), {scratch.data(), width}, part);
    }
  });
  const Scratch sum(width);
  for (int64_t place = 0; place < places; ++place) {
    std::vector<Part> found;
    for (int64_t i = 0; i < parts; ++i) found.emplace_back(results.data(), ROWS, width, place * parts + i);
    write<T>(problem, rows_of(place), found.data(), parts, sum.data(), out);
  }
}

template <int ROWS>
void attend_all(const Problem& problem, const Heads& out) {
  if constexpr (2 * ROWS <= MOST_ROWS)
    if (problem.group() * problem.queries > ROWS) return attend_all<2 * ROWS>(problem, out);
  with_dtype(problem.dtype, [&](auto zero) { attend_all<ROWS, decltype(zero)>(problem, out); });
}

}  // namespace

bool forward_few_rows(const Problem& problem, const Heads& out) {
  const int64_t rows = problem.group() * problem.queries;
  if (rows == 0 || rows > MOST_ROWS || problem.dropout > 0) return false;
  attend_all<1>(problem, out);
  return true;
}

}  // namespace hf_qknorm
