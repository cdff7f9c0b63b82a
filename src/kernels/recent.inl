// The selection a model without an indexer would make: a check mode that the indexer must beat.
static void recent(const RecentArgs& a, const Call& call) {
  const StepHeader& step = *call.step;
  const Slice part = slice(step.tokens, call);
  for (int t = part.first; t < part.last; ++t) {
    int32_t* row = a.out + static_cast<size_t>(t) * a.width;
    const int visible = step.position[t] + 1, n = min_int(a.width, visible);
    for (int i = 0; i < a.width; ++i) row[i] = i < n ? visible - n + i : -1;
    a.count[t] = n;
    if (step.seen_selection && step.seen_selection[a.layer])
      __builtin_memcpy(step.seen_selection[a.layer] + static_cast<size_t>(t) * a.width, row,
                       sizeof(int32_t) * a.width);
    if (step.forced_selection && step.forced_selection[a.layer])
      select_forced(row, a.count + t, step.forced_selection[a.layer] + static_cast<size_t>(t) * a.width,
                    a.width);
  }
}
