// Timed cases of the lightning indexer and of sparse attention, at Kimi-K3.1's dims.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "app/bench_lab.h"
#include "kernels/attention_plan.h"
#include "kernels/index_plan.h"

namespace weft {
namespace {

constexpr int kIndexHeads = 32, kIndexDim = 128, kTopK = 2048;
constexpr int kHeads = 96, kLatent = 512, kRope = 64;
constexpr int kFillRows = 4096;

const char* name(IndexFormat format) {
  return format == IndexFormat::operand ? "bf16" : format == IndexFormat::mxfp8 ? "mxfp8" : "int8";
}
const char* name(LatentFormat format) {
  return format == LatentFormat::operand ? "bf16" : "fp8";
}

// Writes the rows of `length` tokens with the kernel that a model writes them with, into the first copy, and
// copies the copy: narrow formats are only finite when somebody quantised them.
template <class Write>
std::byte* fill_slab(Lab& lab, size_t page_bytes, int length, int copies, const Write& write) {
  const size_t bytes = static_cast<size_t>((length + kPageTokens - 1) / kPageTokens) * page_bytes;
  std::byte* slab = lab.room(bytes * copies);
  for (int first = 0; first < length; first += kFillRows)
    write(slab, lab.sequences({{first, std::min(kFillRows, length - first)}}));
  for (int copy = 1; copy < copies; ++copy) std::memcpy(slab + bytes * copy, slab, bytes);
  return slab;
}

Timed make_index(Lab& lab, IndexFormat format, int length, int tokens) {
  const size_t page_bytes =
      kPageTokens / kPanel * index_panel_bytes(format, kIndexDim, lab.kernels.operand_bytes());
  const size_t bytes = length / kPageTokens * page_bytes;
  Timed timed;
  timed.copies = lab.copies(static_cast<double>(bytes));
  IndexKeyArgs k{};
  k.key = lab.f32(static_cast<size_t>(kFillRows) * kIndexDim), k.ld_key = kIndexDim,
  k.norm = lab.f32(kIndexDim);
  k.norm_bias = lab.f32_room(kIndexDim), k.eps = 1e-6f, k.dim = kIndexDim, k.pool = 1,
  k.page_bytes = page_bytes;
  k.format = format;
  IndexArgs a{};
  a.slab = fill_slab(lab, page_bytes, length, timed.copies, [&](std::byte* slab, const StepHeader& step) {
    k.slab = slab;
    lab.launch(lab.kernels.index_key, k, step);
  });
  a.ld_q = kIndexHeads * kIndexDim, a.q = lab.operand(tokens, a.ld_q), a.ld_weight = kIndexHeads;
  a.weight = lab.f32(static_cast<size_t>(tokens) * kIndexHeads), a.scale = 0.01f, a.heads = kIndexHeads;
  a.dim = kIndexDim, a.topk = a.width = kTopK, a.pool = 1, a.page_bytes = page_bytes, a.format = format;
  a.out = lab.ints(std::vector<int32_t>(static_cast<size_t>(tokens) * kTopK));
  a.count = lab.ints(std::vector<int32_t>(tokens));
  a.part_score = lab.f32_room(static_cast<size_t>(kIndexLists) * kTopK);
  a.part_index = lab.ints(std::vector<int32_t>(static_cast<size_t>(kIndexLists) * kTopK));
  a.part_count = lab.ints(std::vector<int32_t>(kIndexLists));
  const StepHeader& step = lab.sequences({{length - tokens, tokens}});
  timed.cost = cost(a, step);
  if (format == IndexFormat::int8 && lab.kernels.int8_product) timed.peak = Peak::int8;
  const auto runner = [&lab, &step, bytes](IndexArgs args) {
    return [&lab, &step, bytes, args](int copy) {
      IndexArgs at = args;
      at.slab += bytes * copy;
      lab.launch(lab.kernels.index, at, step);
      lab.launch(lab.kernels.index_merge, IndexMergeArgs{at}, step);
    };
  };
  timed.run = runner(a);
  // What is left without the selection: the rest of the time is top-k's share.
  IndexArgs scores = a;
  scores.topk = scores.width = 16;
  timed.others.emplace_back("scores only", runner(scores));
  if (format == IndexFormat::operand) {
    IndexPassesArgs passes{};
    passes.index = a, passes.ld = round_up(length, 64);
    passes.product = lab.f32_room(static_cast<size_t>(lab.threads()) * kIndexHeads * passes.ld);
    passes.score = lab.f32_room(static_cast<size_t>(lab.threads()) * passes.ld);
    timed.others.emplace_back("three passes", [&lab, &step, bytes, passes](int copy) {
      IndexPassesArgs at = passes;
      at.index.slab += bytes * copy;
      lab.launch(lab.kernels.index_passes, at, step);
    });
  }
  return timed;
}

// heads 0: those of the real model over a selection; else so many over the whole prefix.
Timed make_attention(Lab& lab, LatentFormat format, int length, int tokens, int dense_heads = 0) {
  const int heads = dense_heads ? dense_heads : kHeads;
  const size_t row = latent_row_bytes(format, kLatent, kRope, lab.kernels.operand_bytes());
  const size_t page_bytes = kPageTokens * row, bytes = length / kPageTokens * page_bytes;
  const int count = dense_heads ? length : std::min(kTopK, length - tokens);
  Timed timed;
  timed.copies = lab.copies(static_cast<double>(count) * tokens * row);
  LatentArgs l{};
  l.kv = lab.f32(static_cast<size_t>(kFillRows) * (kLatent + kRope)), l.ld_kv = kLatent + kRope;
  l.norm = lab.f32(kLatent), l.eps = 1e-6f, l.latent = kLatent, l.rope = kRope, l.page_bytes = page_bytes;
  l.format = format;
  const int slabs =
      static_cast<int>(std::clamp<double>(kColdBytes / static_cast<double>(bytes), 1, timed.copies));
  AttentionArgs a{};
  a.slab = fill_slab(lab, page_bytes, length, slabs, [&](std::byte* slab, const StepHeader& step) {
    l.slab = slab;
    lab.launch(lab.kernels.latent, l, step);
  });
  a.ld_q = heads * (kLatent + kRope), a.q = lab.operand(tokens, a.ld_q), a.q_head = kLatent + kRope;
  a.heads = heads, a.latent = kLatent, a.rope = kRope, a.scale = 0.05f, a.page_bytes = page_bytes;
  a.format = format, a.width = kTopK, a.ld_out = heads * kLatent, a.out_head = kLatent;
  a.out = lab.operand_room(tokens, a.ld_out);
  a.part_out = lab.f32_room(static_cast<size_t>(kAttentionParts) * heads * kLatent);
  a.part_top = lab.f32_room(static_cast<size_t>(kAttentionParts) * heads);
  a.part_sum = lab.f32_room(static_cast<size_t>(kAttentionParts) * heads);
  // A list per copy, spread over the whole context: cold rows are rows nobody read lately.
  constexpr int kLists = 16;
  std::vector<int32_t> lists;
  uint64_t state = 1;
  for (int i = 0; i < kLists * tokens; ++i)
    for (int j = 0; j < kTopK; ++j) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const int64_t span = length - tokens, low = span * j / count,
                    high = std::max(low + 1, span * (j + 1) / count);
      lists.push_back(j < count ? static_cast<int32_t>(low + static_cast<int64_t>(state >> 33) % (high - low))
                                : -1);
    }
  const int32_t* list = lab.ints(lists);
  if (!dense_heads) a.list = list, a.count = lab.ints(std::vector<int32_t>(tokens, count));
  const StepHeader& step = lab.sequences({{length - tokens, tokens}});
  timed.cost = cost(a, step);
  timed.run = [&lab, &step, a, list, bytes, slabs, tokens](int copy) {
    AttentionArgs at = a;
    at.slab += bytes * (copy % slabs);
    if (at.list) at.list = list + static_cast<size_t>(copy % kLists) * tokens * kTopK;
    lab.launch(lab.kernels.attention, at, step);
    lab.launch(lab.kernels.attention_merge, AttentionMergeArgs{at}, step);
  };
  return timed;
}

// 512 rows of a prompt over all that stands before them, keys and values rebuilt per head.
Timed make_expanded(Lab& lab, int heads, int length) {
  constexpr int kNope = 128, kValue = 128, kRows = 512;
  const size_t page_bytes =
      kPageTokens * latent_row_bytes(LatentFormat::operand, kLatent, kRope, lab.kernels.operand_bytes());
  LatentArgs l{};
  l.kv = lab.f32(static_cast<size_t>(kFillRows) * (kLatent + kRope)), l.ld_kv = kLatent + kRope;
  l.norm = lab.f32(kLatent), l.eps = 1e-6f, l.latent = kLatent, l.rope = kRope, l.page_bytes = page_bytes;
  ExpandedArgs a{};
  a.slab = fill_slab(lab, page_bytes, length, 1, [&](std::byte* slab, const StepHeader& step) {
    l.slab = slab;
    lab.launch(lab.kernels.latent, l, step);
  });
  a.q_head = kNope + kRope, a.ld_q = heads * a.q_head, a.q = lab.operand(kRows, a.ld_q);
  a.pe_head = kRope, a.ld_pe = heads * kRope, a.q_pe = lab.operand(kRows, a.ld_pe);
  a.key = lab.weight(WeightFormat::bf16, kNope, kLatent, heads);
  a.value = lab.weight(WeightFormat::bf16, kValue, kLatent, heads);
  a.heads = heads, a.latent = kLatent, a.nope = kNope, a.rope = kRope, a.v = kValue, a.scale = 0.05f;
  a.page_bytes = page_bytes, a.expand_below = length, a.ld_out = heads * kValue;
  a.out = lab.operand_room(kRows, a.ld_out);
  const StepHeader& step = lab.sequences({{length - kRows, kRows}});
  Timed timed;
  timed.cost = cost(a, step);
  timed.run = [&lab, &step, a](int) { lab.launch(lab.kernels.attention_expanded, a, step); };
  return timed;
}

}  // namespace

void add_dsa_cases(std::vector<KernelCase>& all) {
  for (const int tokens : {1, 64})
    for (const IndexFormat format : {IndexFormat::operand, IndexFormat::mxfp8, IndexFormat::int8})
      for (const int length : {8192, 65536, 262144})
        all.push_back({"li",
                       fmt::format("{} {} K keys, {}", name(format), length / 1024,
                                   tokens == 1 ? "decode" : "prefill 64"),
                       [=](Lab& lab) { return make_index(lab, format, length, tokens); }});
  for (const int tokens : {1, 16})
    for (const LatentFormat format : {LatentFormat::operand, LatentFormat::fp8})
      for (const int length : {4096, 131072})
        all.push_back({"sfa",
                       fmt::format("{} 2048 of {} K, {}", name(format), length / 1024,
                                   tokens == 1 ? "decode" : "prefill 16"),
                       [=](Lab& lab) { return make_attention(lab, format, length, tokens); }});
  for (const int length : {512, 8192})
    all.push_back({"mla", fmt::format("expanded, 512 rows of {}, 16 heads", length),
                   [=](Lab& lab) { return make_expanded(lab, 16, length); }});
  for (const int heads : {8, 96})
    all.push_back({"sfa", fmt::format("bf16 all of 32 K, {} heads, decode", heads),
                   [=](Lab& lab) { return make_attention(lab, LatentFormat::operand, 32768, 1, heads); }});
}

}  // namespace weft
