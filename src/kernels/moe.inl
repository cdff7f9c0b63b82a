// Router, expert sort, the two products of every expert, weighted combine (kimi.md 5, glm5_next.md 3.4).

// The k largest of score [n] by (score descending, index ascending); taken ones become -inf.
static inline int take_best(float* score, int n) {
  int best = -1;
  float top = -__builtin_inff();
  for (int e = 0; e < n; ++e)
    if (score[e] > top) top = score[e], best = e;
  if (best >= 0) score[best] = -__builtin_inff();
  return best;
}

static void route(const RouteArgs& r, const Call& call) {
  Scratch scratch{call.scratch};
  float* chance = scratch.take<float>(round_up(r.experts, 16));
  float* biased = scratch.take<float>(round_up(r.experts, 16));
  float* group_score = scratch.take<float>(round_up(r.groups, 16));
  const StepHeader& step = *call.step;
  const Slice part = slice(step.tokens, call);
  const int per_group = r.experts / r.groups;
  for (int t = part.first; t < part.last; ++t) {
    for (int e = 0; e < r.experts; e += 16) {
      const int left = r.experts - e;
      const V s = sigmoid(load_n(r.logits + static_cast<size_t>(t) * r.ld + e, left));
      store_n(chance + e, s, left);
      store_n(biased + e, s + load_n(r.bias + e, left), left);
    }
    if (r.top_groups < r.groups) {  // group score: its two best biased experts
      for (int g = 0; g < r.groups; ++g) {
        float a = -__builtin_inff(), b = a;
        for (int e = g * per_group; e < (g + 1) * per_group; ++e) {
          const float x = biased[e];
          if (x > a)
            b = a, a = x;
          else if (x > b)
            b = x;
        }
        group_score[g] = per_group > 1 ? a + b : a;
      }
      bool keep[kMaxExpertGroups] = {};
      for (int i = 0; i < r.top_groups; ++i) {
        const int g = take_best(group_score, r.groups);
        if (g >= 0) keep[g] = true;
      }
      for (int g = 0; g < r.groups; ++g)
        if (!keep[g])
          for (int e = g * per_group; e < (g + 1) * per_group; ++e) biased[e] = -__builtin_inff();
    }
    int32_t* chosen = r.expert + static_cast<size_t>(t) * r.top_k;
    for (int j = 0; j < r.top_k; ++j) {
      const int e = take_best(biased, r.experts);
      int at = j;                    // insertion: ascending ids, so that every later sum has one order
      const int id = e < 0 ? j : e;  // all NaN: any id; the norm behind reports the NaN
      while (at > 0 && chosen[at - 1] > id) chosen[at] = chosen[at - 1], --at;
      chosen[at] = id;
    }
    if (step.forced_experts && step.forced_experts[r.layer])
      for (int j = 0; j < r.top_k; ++j)
        chosen[j] = step.forced_experts[r.layer][static_cast<size_t>(t) * r.top_k + j];
    if (step.seen_experts && step.seen_experts[r.layer])
      for (int j = 0; j < r.top_k; ++j)
        step.seen_experts[r.layer][static_cast<size_t>(t) * r.top_k + j] = chosen[j];
    float sum = 0;
    for (int j = 0; j < r.top_k; ++j) sum += chance[chosen[j]];
    const float factor = r.renormalize ? r.scale / (sum + 1e-20f) : r.scale;
    for (int j = 0; j < r.top_k; ++j)
      r.weight[static_cast<size_t>(t) * r.top_k + j] = chance[chosen[j]] * factor;
  }
}

static void expert_sort(const ExpertSortArgs& s, const Call& call) {
  const int total = call.step->tokens * s.top_k;
  for (int i = 0; i <= 2 * s.experts; ++i) s.progress[i] = 0;
  for (int e = 0; e <= s.experts; ++e) s.start[e] = 0;
  for (int i = 0; i < total; ++i) ++s.start[s.expert[i] + 1];
  int active = 0;
  for (int e = 0; e < s.experts; ++e) {
    if (s.start[e + 1]) s.active[++active] = e;
    s.start[e + 1] += s.start[e];
  }
  s.active[0] = active;
  for (int i = 0; i < total; ++i) {
    const int slot = s.start[s.expert[i]]++;
    s.slot_token[slot] = i / s.top_k;
    s.slot_of[i] = slot;
  }
  for (int e = s.experts; e > 0; --e) s.start[e] = s.start[e - 1];  // undo the running ends
  s.start[0] = 0;
}

// Consecutive units of one expert that are taken together: they share the expert's rows.
struct ExpertUnits {
  int pair, count;
  Unit unit[kUnitBlock];
  ExpertUnits(const PackedWeight& w, size_t codes, size_t scales, int expert, int chunk)
      : pair(chunk * kUnitBlock) {
    count = min_int(kUnitBlock, (w.panels() + 1) / 2 - pair);
    for (int u = 0; u < count; ++u)
      unit[u] =
          unit_of(w, w.codes + expert * codes, w.scales ? w.scales + expert * scales : nullptr, pair + u);
  }
};
static inline int expert_chunks(const PackedWeight& w) {
  return (w.panels() + 2 * kUnitBlock - 1) / (2 * kUnitBlock);
}

static constexpr size_t kGatherBytes = size_t{2}
                                       << 20;  // of gathered rows: 16K columns by 32 rows of f32 at least

struct ExpertRoom {
  ProductScratch product;
  int lda, most;  // of gathered rows
  op_t* rows;
  int expert = -1, from = -1;  // what they are
  ExpertRoom(Scratch& s, const ExpertsArgs& x) : product(s) {
    lda = (x.up.k_padded() / kStep | 1) * kStep;  // odd multiple of 64 bytes: no L1 set conflicts
    most = min_int(kRowSuper, static_cast<int>(kGatherBytes / (lda * sizeof(op_t))) / kRowBlock * kRowBlock);
    rows = s.take<op_t>(static_cast<size_t>(most) * lda);
  }
  void gather(const ExpertsArgs& x, int e, int first, int m) {
    if (expert == e && from == first) return;
    for (int r = 0; r < m; ++r)
      __builtin_memcpy(rows + static_cast<size_t>(r) * lda,
                       static_cast<const op_t*>(x.x) + static_cast<size_t>(x.slot_token[first + r]) * x.ld_x,
                       static_cast<size_t>(x.up.k_padded()) * sizeof(op_t));
    expert = e, from = first;
  }
};

static inline void expert_up(const ExpertsArgs& x, ExpertRoom& room, int e, int chunk) {
  const ExpertUnits units(x.up, x.up_codes, x.up_scales, e, chunk);
  const ProductScratch& p = room.product;
  for (int from = x.start[e]; from < x.start[e + 1]; from += room.most) {
    const int m = min_int(room.most, x.start[e + 1] - from);
    room.gather(x, e, from, m);
    product(p.c, p.kLdc, room.rows, room.lda, m, x.up, units.unit, units.count, p.lines, p.partial);
    for (int r = 0; r < m; ++r)
      for (int i = 0; i < units.count; ++i) {
        const float* c = p.c + r * p.kLdc + i * kUnitColumns;
        store(static_cast<op_t*>(x.h) + static_cast<size_t>(from + r) * x.ld_h + (units.pair + i) * kPanel,
              activate(x.act, load(c), load(c + kPanel)));
      }
  }
}

static inline void expert_down(const ExpertsArgs& x, ExpertRoom& room, int e, int chunk) {
  const ExpertUnits units(x.down, x.down_codes, x.down_scales, e, chunk);
  const ProductScratch& p = room.product;
  const int column = units.pair * kUnitColumns, width = min_int(units.count * kUnitColumns, x.width - column);
  for (int from = x.start[e]; from < x.start[e + 1]; from += kRowSuper) {
    const int m = min_int(kRowSuper, x.start[e + 1] - from);
    product(p.c, p.kLdc, static_cast<const op_t*>(x.h) + static_cast<size_t>(from) * x.ld_h, x.ld_h, m,
            x.down, units.unit, units.count, p.lines, p.partial);
    for (int r = 0; r < m; ++r)
      for (int i = 0; i < width; i += 16)
        store_n(x.y + static_cast<size_t>(from + r) * x.ld_y + column + i, load(p.c + r * p.kLdc + i),
                width - i);
  }
}

// No barrier between the two products. Tasks claim chunks from counters: first those of all up products, then
// those of the down products of experts whose up product is complete. A task that finds none ready looks a
// little longer, then leaves: the one that finishes an expert's last up chunk is still here and does the
// rest. So nobody waits for a thread that the system may have taken away.
static void experts(const ExpertsArgs& x, const Call& call) {
  Scratch scratch{call.scratch};
  ExpertRoom room(scratch, x);
  const int active = x.active[0], up = expert_chunks(x.up), down = expert_chunks(x.down);
  int32_t* const done = x.progress + 1;    // up chunks of the i-th active expert
  int32_t* const next = done + x.experts;  // its first down chunk that nobody has taken
  for (int i; (i = __atomic_fetch_add(x.progress, 1, __ATOMIC_RELAXED)) < active * up;) {
    expert_up(x, room, x.active[1 + i / up], i % up);
    __atomic_fetch_add(done + i / up, 1, __ATOMIC_RELEASE);
  }
  constexpr int kLooks = 1000;
  for (int looks = 0, left = 1; left && looks < kLooks; ++looks) {
    left = 0;
    for (int i = 0; i < active; ++i) {
      if (__atomic_load_n(next + i, __ATOMIC_RELAXED) >= down) continue;
      left = 1;
      if (__atomic_load_n(done + i, __ATOMIC_ACQUIRE) < up) continue;
      for (int chunk; (chunk = __atomic_fetch_add(next + i, 1, __ATOMIC_RELAXED)) < down; looks = 0)
        expert_down(x, room, x.active[1 + i], chunk);
    }
  }
}

static void combine(const CombineArgs& x, const Call& call) {
  const Slice part = slice(call.step->tokens, call);
  for (int t = part.first; t < part.last; ++t) {
    float* out = x.out + static_cast<size_t>(t) * x.ld_out;
    const float* weight = x.weight + static_cast<size_t>(t) * x.top_k;
    const int32_t* slot = x.slot_of + static_cast<size_t>(t) * x.top_k;
    for (int i = 0; i < x.width; i += 16) {
      const int left = x.width - i;
      V sum = zero();
      for (int j = 0; j < x.top_k; ++j)
        sum = fma(set1(weight[j]), load_n(x.y + static_cast<size_t>(slot[j]) * x.ld_y + i, left), sum);
      store_n(out + i, x.add ? load_n(out + i, left) + sum : sum, left);
    }
  }
}
