// tanh, exp and the random numbers of dropout, for vectors.
#pragma once

#include "vectors.h"

namespace hf_qknorm {

// Largest |x| for which `tanh_small` holds.
constexpr float SMALL = 0.5f;

// A polynomial of x, from the coefficient of the highest power on.
template <int COUNT, size_t TERMS>
__attribute__((always_inline)) inline Vecs<COUNT> polynomial(const Vecs<COUNT>& x, const float (&coefficients)[TERMS]) {
  auto y = Vecs<COUNT>::of([&](int) { return Vec(coefficients[0]); });
#pragma GCC unroll 8
  for (size_t i = 1; i < TERMS; ++i)
    y = Vecs<COUNT>::of([&](int n) { return at::vec::fmadd(y[n], x[n], Vec(coefficients[i])); });
  return y;
}

// tanh(x) for |x| <= SMALL: x·P(x²), relative error 1.3e-8 before rounding (least maximum error over the interval).
template <int COUNT>
__attribute__((always_inline)) inline Vecs<COUNT> tanh_small(const Vecs<COUNT>& x) {
  const auto square = Vecs<COUNT>::of([&](int i) { return x[i] * x[i]; });
  const auto factor = polynomial(square, {0.017135007f, -0.052986074f, 0.1332478f, -0.3333307f, 1.0f});
  return Vecs<COUNT>::of([&](int i) { return x[i] * factor[i]; });
}

// e^x for x <= 88, without a branch: 0 below -87, NaN for NaN. e^x = 2^n·e^r with |r| <= log(2)/2, relative error 2e-9
// before rounding. n is rounded by adding 1.5·2^23, whose low bits then hold n + 127: the exponent's bits of 2^n.
template <int COUNT>
__attribute__((always_inline)) inline Vecs<COUNT> exp(const Vecs<COUNT>& x) {
  using Each = Vecs<COUNT>;
  const Vec magic(12582912.0f + 127.0f);
  const auto rounded = Each::of([&](int i) { return at::vec::fmadd(x[i], Vec(1.44269504f), magic); });
  const auto n = Each::of([&](int i) { return rounded[i] - magic; });
  // log(2) in two parts, the first one exact in n·log(2)
  auto r = Each::of([&](int i) { return at::vec::fmadd(n[i], Vec(-0.693359375f), x[i]); });
  r = Each::of([&](int i) { return at::vec::fmadd(n[i], Vec(2.12194440e-4f), r[i]); });
  const auto y = polynomial(r, {0.0013836742f, 0.0083748987f, 0.041668232f, 0.1666642f, 0.5f, 1.0f, 1.0f});
  return Each::of([&](int i) {
    const auto bits = at::vec::cast<int32_t>(rounded[i]) << at::vec::Vectorized<int32_t>(23);
    return Vec::blendv(y[i] * at::vec::cast<float>(bits), Vec(0.0f), x[i] < Vec(-87.0f));
  });
}

inline Vec exp(Vec x) { return exp(Vecs<1>{x})[0]; }

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
