// The attention passes.
#pragma once

#include "problem.h"

namespace hf_qknorm {

// Output, and for each row the pair [B, H, T, 2] that makes weights of logits: weight = e^(logit - first)·second. The
// second one is 0 for a row without keys. The pairs are not written if `normaliser` is null.
void forward(const Problem& problem, const Heads& out, float* normaliser);

// Whether the rows of a key head are so few that `forward_few_rows` takes less time.
bool few_rows(const Problem& problem);

// The output alone. Its logits are not rounded as in `backward`, whose weights would not add up to 1.
void forward_few_rows(const Problem& problem, const Heads& out);

// The numbers of a row that sees a key.
struct RowStatistics {
  float largest, entropy;       // |scale·q·k| before the cap; of the weights, in nats
  float seen, over_half, over;  // keys; those with |scale·q·k| over half the threshold, and over it
};

// Write the numbers of each row [B, H, T] that sees a key; others are left as they are.
void measure(const Problem& problem, double threshold, RowStatistics* results);

struct Gradients {
  Heads grad, out;   // of the results: the upstream gradient, and the output
  const float* normaliser;
  float* dq;         // [parts, B, H, T, D], the gradient of q in terms to be added up
  int64_t parts;     // parts of the keys, so that there is work for every thread
  Heads dk, dv;
  float* delta;      // [B, H, T]: grad·out
};

void backward(const Problem& problem, const Gradients& gradients);

}  // namespace hf_qknorm
