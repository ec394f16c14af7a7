// The attention passes.
#pragma once

#include "problem.h"

namespace hf_qknorm {

// Write the output, and for each row the pair of numbers [B, H, T, 2] by which a logit becomes a weight:
// weight = e^(logit - first)·second. The second is 0 for a row without keys. A null `normaliser` leaves the pairs out.
void forward(const Problem& problem, const Heads& out, float* normaliser);

// Write the output, without the pairs, if the rows of a key head are so few that it takes less time; return whether it did.
// `backward` can't follow this pass: it sums up logits in another order, and by pairs of this order its weights would not
// add up to 1.
bool forward_few_rows(const Problem& problem, const Heads& out);

// Statistics of a row that sees a key.
struct RowStatistics {
  float largest, entropy;       // the largest |scale·q·k|; the entropy of the weights, in nats
  float seen, over_half, over;  // numbers of keys: all, those with |scale·q·k| over half the threshold, and over it
};

// Write the statistics [B, H, T] of each row that sees a key; those of other rows are left as they are.
void measure(const Problem& problem, double threshold, RowStatistics* results);

struct Gradients {
  Heads grad, out;   // the gradient of the output, and the output
  const float* normaliser;
  float* dq;         // [parts, B, H, T, D]: the gradient of q is their sum
  int64_t parts;     // parts of the keys, so that there is work for every thread
  Heads dk, dv;
  float* delta;      // [B, H, T]: grad·out
};

void backward(const Problem& problem, const Gradients& gradients);

}  // namespace hf_qknorm
