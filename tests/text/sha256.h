// SHA-256 (FIPS 180-4), for comparing long outputs with recorded digests.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft::testing {

inline std::string sha256_hex(std::string_view data) {
  // The constants are the first 32 bits of the fractional parts of cube and square roots of primes; computed
  // exactly with integers, so that there is no table to mistype.
  const auto root_bits = [](uint64_t n, int power) {
    // Largest r with r^power <= n * 2^(32 power): floor(n^(1/power) * 2^32). Fits 40 bits.
    unsigned __int128 low = 0, high = static_cast<unsigned __int128>(1) << 40;
    while (high - low > 1) {
      const unsigned __int128 mid = (low + high) / 2;
      // mid^3 needs 120 bits, n * 2^96 needs 105.
      const unsigned __int128 value = power == 2 ? mid * mid : mid * mid * mid;
      (value <= static_cast<unsigned __int128>(n) << (32 * power) ? low : high) = mid;
    }
    return static_cast<uint32_t>(low);
  };
  std::array<uint32_t, 64> k;
  std::array<uint32_t, 8> state;
  size_t count = 0;
  for (uint64_t n = 2; count < 64; ++n) {
    bool prime = true;
    for (uint64_t d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
    if (!prime) continue;
    if (count < 8) state[count] = root_bits(n, 2);
    k[count++] = root_bits(n, 3);
  }

  std::string padded(data);
  padded += '\x80';
  while (padded.size() % 64 != 56) padded += '\0';
  for (int shift = 56; shift >= 0; shift -= 8)
    padded += static_cast<char>((uint64_t{data.size()} * 8) >> shift);

  for (size_t block = 0; block < padded.size(); block += 64) {
    std::array<uint32_t, 64> w;
    for (size_t i = 0; i < 16; ++i) {
      w[i] = 0;
      for (size_t j = 0; j < 4; ++j) w[i] = w[i] << 8 | static_cast<unsigned char>(padded[block + 4 * i + j]);
    }
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + k[i] + w[i];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<uint32_t, 8> add = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += add[i];
  }
  std::string hex;
  for (const uint32_t word : state) {
    for (int shift = 28; shift >= 0; shift -= 4) hex += "0123456789abcdef"[(word >> shift) & 15];
  }
  return hex;
}

}  // namespace weft::testing
