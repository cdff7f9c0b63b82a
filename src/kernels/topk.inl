// The exact k best of a stream of scores, in the order: score descending, index ascending; -0 is +0, NaN is
// -inf.
//
// Candidates above a running threshold are appended; when the list is full, it is cut and the threshold
// rises. Expected appends are k (1 + ln(n / k)), so what counts is the test for the threshold (free) and the
// cut. Cuts on the way only drop what k others beat, by a score found in a sample; the last one is exact, by
// a histogram over the bits of the scores, stretched to the range they have. A quickselect there cost more
// than the scoring of 8K keys.

struct TopK {
  float* score;  // [capacity + 16], in the order of the indices
  int32_t* index;
  int n, k, capacity;
  bool full;  // only scores above the threshold can still be among the best
  float threshold;
};

struct TopKRoom {
  float* rest;         // [the largest capacity + 16]
  int32_t* histogram;  // [kTopKBins]
};
static constexpr int kTopKBins = 512;

static inline uint32_t order_bits(float score) {
  const int32_t b = __builtin_bit_cast(int32_t, score);
  return static_cast<uint32_t>(b ^ (b >> 31 | INT32_MIN));
}
static inline float order_score(uint32_t key) {
  const int32_t b = static_cast<int32_t>(key);
  return __builtin_bit_cast(float, b ^ (~b >> 31 | INT32_MIN));
}

static inline V ordered(V score) {
  return max(score, set1(-__builtin_inff())) + zero();
}

// The k-th best score of n > k, and how many of those equal to it are among the k.
static inline float kth_score(const TopK& c, const TopKRoom& room, int* ties) {
  const float* score = c.score;
  int n = c.n, want = c.k;
  for (;;) {
    V least = set1(__builtin_inff()), most = set1(-__builtin_inff());
    for (int i = 0; i < n; i += 16) {
      const M there = first_n(n - i);
      const V x = load(score + i);
      least = min(select(there, x, least), least);
      most = max(select(there, x, most), most);
    }
    const uint32_t low = order_bits(0.f - hmax(negate(least))), high = order_bits(hmax(most));
    *ties = want;
    if (low == high) return order_score(low);
    const int width = 32 - __builtin_clz(high - low), shift = width > 9 ? width - 9 : 0;  // at most 512 bins
    for (int i = 0; i < kTopKBins; ++i) room.histogram[i] = 0;
    for (int i = 0; i < n; ++i) ++room.histogram[(order_bits(score[i]) - low) >> shift];
    uint32_t bin = (high - low) >> shift;
    while (room.histogram[bin] < want) want -= room.histogram[bin--];
    // The scores of that bin alone, and again.
    const uint64_t end = static_cast<uint64_t>(low) + ((static_cast<uint64_t>(bin) + 1) << shift);
    const V first = set1(order_score(low + (bin << shift)));
    const V last = set1(end > high ? __builtin_inff() : order_score(static_cast<uint32_t>(end - 1)));
    int kept = 0;
    for (int i = 0; i < n; i += 16) {
      const V x = load(score + i);
      const uint32_t outside = bits(less(x, first)) | bits(less(last, x));
      kept += compress(room.rest + kept, x, from_bits(bits(first_n(n - i)) & ~outside));
    }
    n = kept;
    score = room.rest;
  }
}

// Drops what lies at or below a sampled score that more than k others exceed; false when the sample finds
// none.
static inline bool drop_lowest(TopK& c, const TopKRoom& room) {
  constexpr int kEvery = 16, kMargin = 12;  // 1.5 standard deviations of the rank in a sample of 264
  TopK sample{room.rest + c.n / 2, nullptr, 0, c.k / kEvery + kMargin, 0, false, 0};
  for (int i = 0; i < c.n; i += kEvery) sample.score[sample.n++] = c.score[i];
  if (sample.k >= sample.n) return false;
  int ties, above = 0;
  const float low = kth_score(sample, room, &ties);
  for (int i = 0; i < c.n; i += 16)
    above += __builtin_popcount(bits(less(set1(low), load(c.score + i))) & bits(first_n(c.n - i)));
  if (above < c.k || above > min_int(c.n - c.n / 8, c.capacity - 64)) return false;  // 64: the next block
  int kept = 0;
  for (int i = 0; i < c.n; i += 16) {
    const V x = load(c.score + i);
    const M chosen = from_bits(bits(less(set1(low), x)) & bits(first_n(c.n - i)));
    compress(c.index + kept, c.index + i, chosen);
    kept += compress(c.score + kept, x, chosen);
  }
  c.n = kept;
  c.full = true;
  c.threshold = low;
  return true;
}

static inline void shrink(TopK& c, const TopKRoom& room) {
  if (c.n <= c.k) return;
  int ties;
  const float kth = kth_score(c, room, &ties);
  int kept = 0;
  for (int i = 0; i < c.n; i += 16) {
    const V x = load(c.score + i), t = set1(kth);
    const uint32_t valid = bits(first_n(c.n - i)), above = bits(less(t, x)) & valid;
    uint32_t equal = valid & ~above & ~bits(less(x, t)), chosen = above;
    for (; equal && ties > 0; equal &= equal - 1, --ties) chosen |= equal & -equal;  // the lowest index first
    compress(c.index + kept, c.index + i, from_bits(chosen));
    kept += compress(c.score + kept, x, from_bits(chosen));
  }
  c.n = kept;
  c.full = true;
  c.threshold = kth;
}

// Up to 64 scores of ascending indices: four groups of 16, of which `valid` are there.
static inline void offer(TopK& c, const TopKRoom& room, const V* score, const int* first,
                         const uint32_t* valid, int groups) {
  uint32_t chosen[4], any = 0;
  for (int i = 0; i < groups; ++i) {
    chosen[i] = c.full ? bits(less(set1(c.threshold), score[i])) & valid[i] : valid[i];
    any |= chosen[i];
  }
  if (!any) return;
  for (int i = 0; i < groups; ++i) {  // no branch: it would be mispredicted once a block
    compress_range(c.index + c.n, first[i], from_bits(chosen[i]));
    c.n += compress(c.score + c.n, score[i], from_bits(chosen[i]));
  }
  if (c.n + 64 > c.capacity && !drop_lowest(c, room)) shrink(c, room);
}
