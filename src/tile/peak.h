// Register-only loops: the most a machine multiplies. `data` is 4 KB of random values (zeros flatter tiles by
// a fifth), one round 2^20 operations.

#ifdef WEFT_TILES
// 64 (bf16) or 32 (int8) products are 2^20 operations. Four accumulators hide a tile product's latency of 52
// cycles.
template <bool kInt8>
static inline void peak_tiles(const std::byte* data, int rounds, float* sink) {
  tile_load<4>(data, 64), tile_load<5>(data + 1024, 64);
  tile_load<6>(data + 2048, 64), tile_load<7>(data + 3072, 64);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int round = 0; round < rounds; ++round)
    for (int i = 0; i < (kInt8 ? 8 : 16); ++i) {
      if constexpr (kInt8) {
        tile_dot_int8<0, 4, 6>(), tile_dot_int8<1, 4, 7>(), tile_dot_int8<2, 5, 6>(),
            tile_dot_int8<3, 5, 7>();
      } else {
        tile_dot<0, 4, 6>(), tile_dot<1, 4, 7>(), tile_dot<2, 5, 6>(), tile_dot<3, 5, 7>();
      }
    }
  tile_store<0>(sink, 64);
}
#endif

// `step` does one round of 16 independent chains.
template <class Step>
static inline void peak_chains(int rounds, float* sink, int operations, const Step& step) {
  V acc[16];
  for (V& a : acc) a = zero();
  for (int round = 0; round < rounds; ++round)
    for (int i = 0; i < (1 << 20) / operations; ++i) step(acc);
  V sum = zero();
  for (const V& a : acc) sum = sum + a;
  store(sink, sum);
}

static void peak_product(const std::byte* data, int rounds, float* sink) {
#if defined(WEFT_TILES)
  peak_tiles<false>(data, rounds, sink);
#elif defined(WEFT_BF16_PRODUCT)
  const bf16* a = reinterpret_cast<const bf16*>(data);
  const Line w[2] = {load_line(a + 64), load_line(a + 96)};
  peak_chains(rounds, sink, 16 * 64, [&](V* acc) {
    for (int i = 0; i < 16; ++i) acc[i] = dot_pair(acc[i], a + 2 * (i / 2), w[i % 2]);
  });
#else
  const float* a = reinterpret_cast<const float*>(data);
  const V w[2] = {load(a), load(a + 16)};
  const V x = load(a + 32);
  // 16 lanes are two registers or more here: six chains in flight are what the register file holds
  V acc[6] = {};
  for (int round = 0; round < rounds; ++round)
    for (int i = 0; i < (1 << 20) / (6 * 32); ++i)
      for (int j = 0; j < 6; ++j) acc[j] = fma(w[j % 2], x, acc[j]);
  store(sink, acc[0] + acc[1] + acc[2] + acc[3] + acc[4] + acc[5]);
#endif
}

static void peak_int8(const std::byte* data, int rounds, float* sink) {
#if defined(WEFT_TILES)
  peak_tiles<true>(data, rounds, sink);
#elif defined(WEFT_INT8_PRODUCT)
  const Line a[2] = {load_line(reinterpret_cast<const bf16*>(data)),
                     load_line(reinterpret_cast<const bf16*>(data) + 32)};
  const Line w = load_line(reinterpret_cast<const bf16*>(data) + 64);
  Line acc[16] = {};
  for (int round = 0; round < rounds; ++round)
    for (int i = 0; i < (1 << 20) / (16 * 128); ++i)
      for (int j = 0; j < 16; ++j) dot_quads(acc[j], a[j % 2], w);
  for (int j = 1; j < 16; ++j) dot_quads(acc[0], acc[j], w);
  __builtin_memcpy(sink, &acc[0], 64);
#endif
}

static void peak_fma(const std::byte* data, int rounds, float* sink) {
  const float* a = reinterpret_cast<const float*>(data);
  const V x = load(a), y = load(a + 16);
  constexpr int kChains = kBlockRows * kBlockPanels >= 16 ? 16 : 6;
  peak_chains(rounds, sink, kChains * 32, [&](V* acc) {
    for (int i = 0; i < kChains; ++i) acc[i] = fma(x, y, acc[i]);
  });
}
