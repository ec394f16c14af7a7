// tanh, exp and the random numbers of dropout, for vectors.
#pragma once

#include "vectors.h"

namespace hf_qknorm {

// Largest |x| for which `tanh_small` holds.
constexpr float SMALL = 0.5f;

// tanh(x) for |x| <= SMALL: x·P(x²), relative error 1.3e-8 before rounding (least maximum error over the interval).
inline Vec tanh_small(Vec x) {
  const Vec square = x * x;
  Vec factor = at::vec::fmadd(Vec(0.017135007f), square, Vec(-0.052986074f));
  factor = at::vec::fmadd(factor, square, Vec(0.1332478f));
  factor = at::vec::fmadd(factor, square, Vec(-0.3333307f));
  factor = at::vec::fmadd(factor, square, Vec(1.0f));
  return x * factor;
}

// e^x for x <= 88, without a branch: 0 below -87, NaN for NaN. e^x = 2^n·e^r with |r| <= log(2)/2, relative error 2e-9
// before rounding. n is rounded by adding 1.5·2^23, whose low bits then hold n + 127: the exponent's bits of 2^n.
inline Vec exp(Vec x) {
  const Vec magic(12582912.0f + 127.0f);
  const Vec rounded = at::vec::fmadd(x, Vec(1.44269504f), magic);
  const Vec n = rounded - magic;
  Vec r = at::vec::fmadd(n, Vec(-0.693359375f), x);  // log(2) in two parts, the first one exact in n·log(2)
  r = at::vec::fmadd(n, Vec(2.12194440e-4f), r);
  Vec y = at::vec::fmadd(Vec(0.0013836742f), r, Vec(0.0083748987f));
  y = at::vec::fmadd(y, r, Vec(0.041668232f));
  y = at::vec::fmadd(y, r, Vec(0.1666642f));
  y = at::vec::fmadd(y, r, Vec(0.5f));
  y = at::vec::fmadd(y, r, Vec(1.0f));
  y = at::vec::fmadd(y, r, Vec(1.0f));
  const auto bits = at::vec::cast<int32_t>(rounded) << at::vec::Vectorized<int32_t>(23);
  y = y * at::vec::cast<float>(bits);
  return Vec::blendv(y, Vec(0.0f), x < Vec(-87.0f));
}

// A 64-bit mix of its argument (splitmix64).
inline uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

using IntVec = at::vec::Vectorized<int32_t>;

// A 32-bit mix of its argument (lowbias32), of unsigned numbers: the shifts bring in zeros.
inline IntVec mix(IntVec x) {
  x = x ^ ((x >> IntVec(16)) & IntVec(0xFFFF));
  x = x * IntVec(0x7FEB352D);
  x = x ^ ((x >> IntVec(15)) & IntVec(0x1FFFF));
  x = x * IntVec(int32_t(0x846CA68Bu));
  return x ^ ((x >> IntVec(16)) & IntVec(0xFFFF));
}

}  // namespace hf_qknorm
