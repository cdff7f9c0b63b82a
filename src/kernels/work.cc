#include "kernels/work.h"

#include "kernels/attention_plan.h"
#include "kernels/index_plan.h"

#include <algorithm>

namespace weft {
namespace {

double weight_bytes(const PackedWeight& w) { return static_cast<double>(w.code_bytes() + w.scale_bytes()); }

// Rows of f32 or operand values read and written once, `f` flops per value.
Cost rows_cost(int rows, double values, double f) { return {rows * values * 4, rows * values * f}; }

// Rows of a span that the expanded form takes: whole aligned blocks of 64 below a position.
struct Range {
  int from, to;  // positions
  int rows() const { return std::max(0, to - from); }
};
Range expanded_rows(const Span& span, int below) {
  return {round_up(span.position, kKeyBlock),
          std::min((span.position + span.length) / kKeyBlock * kKeyBlock, below)};
}

}  // namespace

int row_count(Rows rows, const StepHeader& step) { return rows == Rows::tokens ? step.tokens : step.logit_rows; }

Cost cost(const EmbedArgs& a, const StepHeader& s) { return rows_cost(s.tokens, a.width * (a.copies + 0.5), 0); }
Cost cost(const NormArgs& a, const StepHeader& s) { return rows_cost(row_count(a.rows, s), 2.0 * a.width, 2); }
Cost cost(const GemmArgs& a, const StepHeader& s) {
  const double rows = row_count(a.rows, s), n = static_cast<double>(a.w.n) * a.groups;
  return {weight_bytes(a.w) * a.groups + rows * (static_cast<double>(a.w.k) * a.groups + n) * 4, 2 * rows * n * a.w.k};
}
Cost cost(const KdaArgs& a, const StepHeader& s) {
  const double heads = static_cast<double>(a.heads), kv = static_cast<double>(a.key_dim) * a.value_dim;
  const double row = 3.0 * a.key_dim + 3.0 * a.value_dim;
  return {heads * (s.spans * kv * 8 + s.tokens * row * 2),
          heads * s.tokens * (6 * kv + 2.0 * kKdaChunk * (2 * a.key_dim + 2 * a.value_dim))};
}
Cost cost(const RopeTableArgs& a, const StepHeader& s) { return rows_cost(s.tokens, 2.0 * a.pairs, 40); }
Cost cost(const RopeArgs& a, const StepHeader& s) { return rows_cost(s.tokens, 2.0 * a.heads * a.dims, 2); }
Cost cost(const LatentArgs& a, const StepHeader& s) { return rows_cost(s.tokens, 2.0 * (a.latent + a.rope), 2); }
Cost cost(const IndexKeyArgs& a, const StepHeader& s) { return rows_cost(s.tokens, 2.0 * a.dim, 4); }
Cost cost(const IndexArgs& a, const StepHeader& s) {
  double scored = 0, keys = 0;  // rows that see no more than top-k are not scored
  for (int t = 0; t < s.tokens; ++t)
    if (s.position[t] + 1 > a.topk) scored += s.position[t] + 1;
  for (int i = 0; i < s.spans; ++i) keys += s.span[i].position + s.span[i].length;
  return {scored > 0 ? keys / a.pool * index_panel_bytes(a.format, a.dim, 2) / kPanel : 0, 2 * scored / a.pool * a.heads * a.dim};
}
Cost cost(const IndexPassesArgs& a, const StepHeader& s) {
  Cost c = cost(a.index, s);
  c.coarse = true;  // a task has its own room
  return c;
}
Cost cost(const IndexMergeArgs& a, const StepHeader& s) {
  return rows_cost(s.tokens, 2.0 * index_plan(a.index, s).parts * a.index.topk / a.index.pool, 4);
}
Cost cost(const RecentArgs& a, const StepHeader& s) { return {s.tokens * a.width * 4.0, 0}; }
Cost cost(const AttentionArgs& a, const StepHeader& s) {
  double pairs = 0, keys = 0;
  for (int i = 0; i < s.spans; ++i) {
    const Span& span = s.span[i];
    double own = 0;
    for (int t = span.begin; t < span.begin + span.length; ++t) {
      const int seen = s.position[t] + 1;
      if (!expands(s, t, a.expand_below)) own += a.list ? std::min(a.width, seen) : seen;
    }
    pairs += own, keys += std::min<double>(own, span.position + span.length);
  }
  return {keys * latent_row_bytes(a.format, a.latent, a.rope, 2), 2 * pairs * a.heads * (2.0 * a.latent + a.rope),
          s.tokens < 16 && attention_segments(a, s) == 1};  // heads of one token share the gathered rows
}
Cost cost(const AttentionMergeArgs& args, const StepHeader& s) {
  const AttentionArgs& a = args.attention;
  return rows_cost(s.tokens, (attention_segments(a, s) + 0.5) * a.heads * a.latent / 2, 4);
}
Cost cost(const ExpandedArgs& a, const StepHeader& s) {
  Cost sum;
  for (int i = 0; i < s.spans; ++i) {
    const Range rows = expanded_rows(s.span[i], a.expand_below);
    if (rows.rows() == 0) continue;
    const double pairs = 0.5 * (static_cast<double>(rows.to) * rows.to - static_cast<double>(rows.from) * rows.from);
    sum.bytes += static_cast<double>(rows.to) * latent_row_bytes(a.format, a.latent, a.rope, 2) + weight_bytes(a.key) + weight_bytes(a.value);
    sum.flops += a.heads * (2 * pairs * (a.nope + a.rope + a.v) + 2.0 * rows.to * a.latent * (a.nope + a.v));
  }
  return sum;
}
Cost cost(const MixArgs& a, const StepHeader& s) {
  return rows_cost(row_count(a.rows, s), (a.sources + (a.ld_bank ? 2.0 : 1.0)) * a.width, 3);
}
Cost cost(const MixBankArgs& a, const StepHeader& s) {
  const double rows = static_cast<double>(s.tokens) * a.width, pairs = static_cast<double>(a.sources) * a.sites;
  return {rows * (a.sources + a.sites) * 4, rows * (4 * pairs + 2 * a.sources), mix_bank_cut(a, s.tokens) > 1};
}
Cost cost(const HcPreArgs& a, const StepHeader& s) { return rows_cost(s.tokens, (a.streams + 1.0) * a.width, 2); }
Cost cost(const HcPostArgs& a, const StepHeader& s) { return rows_cost(s.tokens, (2.0 * a.streams + 1) * a.width, 4); }
Cost cost(const HcEndArgs& a, const StepHeader& s) {
  return rows_cost(row_count(a.rows, s), (a.streams + 1.0) * a.width, 1);
}
Cost cost(const RouteArgs& a, const StepHeader& s) { return rows_cost(s.tokens, a.experts, 8.0 + a.top_k); }
Cost cost(const ExpertSortArgs& a, const StepHeader& s) { return rows_cost(1, 4.0 * s.tokens * a.top_k + a.experts, 1); }
Cost cost(const ExpertsArgs& a, const StepHeader& s) {
  const double rows = static_cast<double>(s.tokens) * a.top_k;
  return {(weight_bytes(a.up) + weight_bytes(a.down)) * std::min<double>(a.experts, rows) +
              rows * (a.up.k * 2 + a.intermediate * 4.0 + a.width * 4),
          2 * rows * (static_cast<double>(a.up.n) * a.up.k + static_cast<double>(a.down.n) * a.down.k),
          true};  // tasks share the work out between them
}
Cost cost(const CombineArgs& a, const StepHeader& s) { return rows_cost(s.tokens, (a.top_k + 1.0) * a.width, 2); }
Cost cost(const CopyArgs& a, const StepHeader& s) { return rows_cost(row_count(a.rows, s), 2.0 * a.width, 0); }

int units(const EmbedArgs&, const StepHeader& s) { return s.tokens; }
int units(const NormArgs& a, const StepHeader& s) { return row_count(a.rows, s); }
int units(const GemmArgs& a, const StepHeader& s) {
  return row_count(a.rows, s) ? a.groups * ((a.w.panels() + 1) / 2) : 0;
}
int units(const KdaArgs& a, const StepHeader& s) { return s.spans * a.heads; }
int units(const RopeTableArgs&, const StepHeader& s) { return s.tokens; }
int units(const RopeArgs&, const StepHeader& s) { return s.tokens; }
int units(const LatentArgs&, const StepHeader& s) { return s.tokens; }
int units(const IndexKeyArgs& a, const StepHeader& s) { return a.pool == 1 ? s.tokens : s.spans; }
int units(const IndexArgs& a, const StepHeader& s) {
  const IndexPlan plan = index_plan(a, s);
  return plan.tiles * plan.parts;
}
int units(const IndexPassesArgs&, const StepHeader& s) { return s.tokens; }
int units(const IndexMergeArgs& a, const StepHeader& s) { return index_plan(a.index, s).parts > 1 ? s.tokens : 0; }
int units(const AttentionArgs& a, const StepHeader& s) {
  const int segments = attention_segments(a, s);
  return s.tokens * (segments > 1 ? segments : (a.heads + kPanel - 1) / kPanel);
}
int units(const AttentionMergeArgs& a, const StepHeader& s) {
  return attention_segments(a.attention, s) > 1 ? s.tokens * a.attention.heads : 0;
}
int units(const RecentArgs&, const StepHeader& s) { return s.tokens; }
int units(const ExpandedArgs& a, const StepHeader& s) {
  for (int i = 0; i < s.spans; ++i)
    if (expanded_rows(s.span[i], a.expand_below).rows()) return s.spans * a.heads;
  return 0;
}
int units(const MixArgs& a, const StepHeader& s) { return row_count(a.rows, s); }
int units(const MixBankArgs& a, const StepHeader& s) { return s.tokens * mix_bank_cut(a, s.tokens); }
int units(const HcPreArgs&, const StepHeader& s) { return s.tokens; }
int units(const HcPostArgs&, const StepHeader& s) { return s.tokens; }
int units(const HcEndArgs& a, const StepHeader& s) { return row_count(a.rows, s); }
int units(const RouteArgs&, const StepHeader& s) { return s.tokens; }
int units(const ExpertSortArgs&, const StepHeader& s) { return s.tokens ? 1 : 0; }
int units(const ExpertsArgs& a, const StepHeader& s) {  // chunks of 8 panel pairs
  return std::min(a.experts, s.tokens * a.top_k) * ((a.up.panels() + 15) / 16 + (a.down.panels() + 15) / 16);
}
int units(const CombineArgs&, const StepHeader& s) { return s.tokens; }
int units(const CopyArgs& a, const StepHeader& s) { return row_count(a.rows, s); }

int task_count(int units, const Cost& cost, int threads) {
  if (threads == 1) return std::min(units, 1);
  // About 2 us of one slow core per task; a fork and join is 0.4 us, and finer cuts only help balance. A thread that
  // finds no task left waits for half of one, so the longest nodes are cut finer, down to 2 MB: with 8 per thread
  // threads waited 1-6 % of the products of a DSA layer of real-kimi-k31, with up to 32 it is 1 %.
  const double tasks = std::max(cost.bytes / 20e3, cost.flops / 100e3);
  const double most = std::clamp(std::min(cost.bytes / 2e6, units / 8.0), 8.0 * threads, 32.0 * threads);
  const int wanted = std::min(units, static_cast<int>(std::clamp(tasks, 1.0, cost.coarse ? threads : most)));
  if (wanted == 0) return 0;
  const int size = (units + wanted - 1) / wanted;  // 8 units in 6 tasks take as long as in 4
  return (units + size - 1) / size;
}

FirstWeights first_weights(const GemmArgs& a, const StepHeader& s, int task, int tasks) {
  constexpr int kSideBySide = 8;  // panels that one row meets at once
  const int panels = a.w.panels(), pairs = (panels + 1) / 2;
  const int first = static_cast<int>(static_cast<int64_t>(units(a, s)) * task / tasks),
            panel = first % pairs * 2;
  return {a.w.codes + first / pairs * a.w.code_bytes() + panel * a.w.panel_bytes(), a.w.panel_bytes(),
          std::min(kSideBySide, panels - panel)};
}

}  // namespace weft
