// Router, expert sort, the two expert products, weighted combine (kimi.md 5, glm5_next.md 3.4).

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
          if (x > a) b = a, a = x;
          else if (x > b) b = x;
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
      int at = j;  // insertion: ascending ids, so that every later sum has one order
      const int id = e < 0 ? j : e;  // all NaN: any id; the norm behind reports the NaN
      while (at > 0 && chosen[at - 1] > id) chosen[at] = chosen[at - 1], --at;
      chosen[at] = id;
    }
    if (step.forced_experts && step.forced_experts[r.layer])
      for (int j = 0; j < r.top_k; ++j)
        chosen[j] = step.forced_experts[r.layer][static_cast<size_t>(t) * r.top_k + j];
    if (step.seen_experts && step.seen_experts[r.layer])
      for (int j = 0; j < r.top_k; ++j) step.seen_experts[r.layer][static_cast<size_t>(t) * r.top_k + j] = chosen[j];
    float sum = 0;
    for (int j = 0; j < r.top_k; ++j) sum += chance[chosen[j]];
    const float factor = r.renormalize ? r.scale / (sum + 1e-20f) : r.scale;
    for (int j = 0; j < r.top_k; ++j) r.weight[static_cast<size_t>(t) * r.top_k + j] = chance[chosen[j]] * factor;
  }
}

static void expert_sort(const ExpertSortArgs& s, const Call& call) {
  const int total = call.step->tokens * s.top_k;
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

static constexpr int kExpertRows = kBf16Operands ? 64 : 32;  // gathered at once: 16K columns fit the scratch

static void expert_up(const ExpertUpArgs& x, const Call& call) {
  Scratch scratch{call.scratch};
  const ProductScratch room(scratch);
  const int lda = round_up(x.w.k, kStep) + kStep;  // odd multiple of 64 bytes: no L1 set conflicts
  op_t* rows = scratch.take<op_t>(static_cast<size_t>(kExpertRows) * lda);
  const int pairs = (x.w.panels() + 1) / 2, active = x.active[0];
  const Slice part = slice(active * pairs, call);
  int gathered_expert = -1, gathered_from = -1;
  for (int u = part.first; u < part.last; ++u) {
    const int e = x.active[1 + u / pairs], pair = u % pairs;
    const Unit unit = unit_of(x.w, x.w.codes + e * x.expert_codes,
                              x.w.scales ? x.w.scales + e * x.expert_scales : nullptr, pair);
    for (int from = x.start[e]; from < x.start[e + 1]; from += kExpertRows) {
      const int m = min_int(kExpertRows, x.start[e + 1] - from);
      if (gathered_expert != e || gathered_from != from) {
        for (int r = 0; r < m; ++r)
          __builtin_memcpy(rows + static_cast<size_t>(r) * lda,
                           static_cast<const op_t*>(x.x) + static_cast<size_t>(x.slot_token[from + r]) * x.ld_x,
                           static_cast<size_t>(x.w.k_padded()) * sizeof(op_t));
        gathered_expert = e, gathered_from = from;
      }
      product(room.c, room.kLdc, rows, lda, m, x.w, &unit, 1, room.lines, room.partial);
      for (int r = 0; r < m; ++r) {
        const float* c = room.c + r * room.kLdc;
        store(static_cast<op_t*>(x.h) + static_cast<size_t>(from + r) * x.ld_h + pair * kPanel,
              activate(x.act, load(c), load(c + kPanel)));
      }
    }
  }
}

static void expert_down(const ExpertDownArgs& x, const Call& call) {
  Scratch scratch{call.scratch};
  const ProductScratch room(scratch);
  const int pairs = (x.w.panels() + 1) / 2, active = x.active[0];
  const Slice part = slice(active * pairs, call);
  for (int u = part.first; u < part.last; ++u) {
    const int e = x.active[1 + u / pairs], pair = u % pairs;
    const Unit unit = unit_of(x.w, x.w.codes + e * x.expert_codes,
                              x.w.scales ? x.w.scales + e * x.expert_scales : nullptr, pair);
    const int column = pair * kUnitColumns, width = min_int(kUnitColumns, x.width - column);
    for (int from = x.start[e]; from < x.start[e + 1]; from += kRowSuper) {
      const int m = min_int(kRowSuper, x.start[e + 1] - from);
      product(room.c, room.kLdc, static_cast<const op_t*>(x.h) + static_cast<size_t>(from) * x.ld_h, x.ld_h, m, x.w,
              &unit, 1, room.lines, room.partial);
      for (int r = 0; r < m; ++r)
        for (int i = 0; i < width; i += 16)
          store_n(x.y + static_cast<size_t>(from + r) * x.ld_y + column + i, load(room.c + r * room.kLdc + i),
                  width - i);
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
