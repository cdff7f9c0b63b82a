// Shapes the kernels are tested at, and the real ones they are timed at. A case prints itself.
#pragma once

#include <ostream>
#include <vector>

#include "kernels/kernels.h"

namespace weft::cases {

inline const char* name(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::store_f32:
      return "store_f32";
    case Epilogue::add_f32:
      return "add_f32";
    case Epilogue::store_op:
      return "store_op";
    case Epilogue::activate:
      return "activate";
    case Epilogue::gate_op:
      return "gate_op";
  }
  return "?";
}
inline const char* name(Act act) {
  return act == Act::swiglu ? "swiglu" : act == Act::swiglu_clamped ? "swiglu_clamped" : "situ";
}
inline const char* name(RopeMode mode) {
  return mode == RopeMode::none ? "none" : mode == RopeMode::interleaved ? "interleaved" : "half_split";
}

inline constexpr WeightFormat kFormats[] = {WeightFormat::bf16, WeightFormat::f32, WeightFormat::e4m3,
                                            WeightFormat::mxfp4, WeightFormat::mxfp8, WeightFormat::int8};
inline constexpr Epilogue kEpilogues[] = {Epilogue::store_f32, Epilogue::add_f32, Epilogue::store_op,
                                          Epilogue::activate, Epilogue::gate_op};
// One less, exact, one more than every register block, tile and row block.
inline constexpr int kRows[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100};
inline constexpr ActParams kActs[] = {
    {}, {Act::swiglu_clamped, 1.5f, 0, 0}, {Act::situ, 0, 4, 25}, {Act::situ, 0, 4, 0}};

struct GemmCase {
  WeightFormat format;
  Epilogue epilogue;
  int n, k;
  int groups = 1;
  bool precise = false;
  ActParams act = {};
};
inline std::ostream& operator<<(std::ostream& out, const GemmCase& c) {
  return out << format_name(c.format) << ' ' << name(c.epilogue) << " n " << c.n << " k " << c.k << " groups "
             << c.groups << (c.precise ? " precise" : "") << (c.epilogue == Epilogue::activate ? " " : "")
             << (c.epilogue == Epilogue::activate ? name(c.act.kind) : "");
}
inline std::vector<GemmCase> gemm_cases() {
  std::vector<GemmCase> all;
  for (const WeightFormat format : kFormats) {
    for (const Epilogue epilogue : kEpilogues) {
      const bool pairs = epilogue == Epilogue::activate;
      all.push_back({format, epilogue, pairs ? 64 : 37, 45});
      all.push_back({format, epilogue, pairs ? 128 : 50, 300, 1, false, pairs ? kActs[1] : ActParams{}});
      all.push_back({format, epilogue, pairs ? 64 : 24, 33, 3, false, pairs ? kActs[2] : ActParams{}});
    }
    all.push_back({format, Epilogue::activate, 64, 96, 1, false, kActs[3]});
    all.push_back({format, Epilogue::store_f32, 17, 301, 1, true});
    all.push_back({format, Epilogue::store_f32, 130, 200});  // two rows of scale blocks, ragged both ways
    all.push_back({format, Epilogue::store_f32, 1, 1});
  }
  return all;
}

// Sizes people run, for timing.
inline constexpr int kRealRows[] = {1, 4, 16, 64, 512};
inline std::vector<GemmCase> real_gemm_cases() {
  std::vector<GemmCase> all;
  for (const WeightFormat format : kFormats) all.push_back({format, Epilogue::store_f32, 4096, 4096});
  all.push_back({WeightFormat::bf16, Epilogue::activate, 4096, 4096, 1, false, kActs[2]});
  all.push_back({WeightFormat::bf16, Epilogue::add_f32, 1024, 1024});
  all.push_back({WeightFormat::f32, Epilogue::store_f32, 256, 4096, 1, true});  // a router
  return all;
}

enum class Gate { softplus, bounded, still, floor, reset, tiny, huge };
inline const char* name(Gate gate) {
  constexpr const char* kNames[] = {"softplus", "bounded", "still", "floor", "reset", "tiny", "huge"};
  return kNames[static_cast<int>(gate)];
}
// still: g = 0 everywhere; floor: -5 everywhere; reset: some tokens and channels at -1000; tiny: -27 per
// channel; huge: an input near the largest f32 in every channel of some tokens.
inline constexpr Gate kGates[] = {Gate::softplus, Gate::bounded, Gate::still, Gate::floor,
                                  Gate::reset,    Gate::tiny,    Gate::huge};

struct KdaCase {
  int heads, key_dim, value_dim;
  Gate gate;
  int tokens;
  double correlation = 0;    // of the keys of neighbouring tokens
  bool strong_beta = false;  // beta -> 1
  int zero_every = 0;        // every n-th token has q = k = v = 0, the next one is small
  int taps = 4;
};
inline std::ostream& operator<<(std::ostream& out, const KdaCase& c) {
  return out << "heads " << c.heads << " K " << c.key_dim << " V " << c.value_dim << " gate " << name(c.gate)
             << " tokens " << c.tokens << " correlation " << c.correlation << (c.strong_beta ? " beta 1" : "")
             << " zero every " << c.zero_every << " taps " << c.taps;
}
inline std::vector<KdaCase> kda_cases() {
  std::vector<KdaCase> all;
  for (const int tokens : {1, 2, 3, 15, 16, 17, 63, 64, 65})
    all.push_back({2, 8, 12, Gate::softplus, tokens});
  for (const Gate gate : kGates) {
    all.push_back({3, 20, 20, gate, 33});
    all.push_back({1, 8, 12, gate, 64});
  }
  for (const double correlation : {0.7, 0.98})
    for (const Gate gate : {Gate::still, Gate::softplus, Gate::bounded}) {
      all.push_back({1, 128, 64, gate, 65, correlation, true});
      all.push_back({2, 8, 12, gate, 47, correlation, true});
    }
  all.push_back({2, 128, 128, Gate::softplus, 65});
  all.push_back({1, 128, 128, Gate::bounded, 64});
  all.push_back({1, 256, 40, Gate::bounded, 31});
  for (const Gate gate : kGates) {  // chunks of 64, and every way a last one is short
    all.push_back({2, 32, 20, gate, 97});
    all.push_back({1, 128, 48, gate, 130});
  }
  for (const int tokens : {32, 33, 48, 63, 64, 127, 128}) all.push_back({1, 64, 16, Gate::softplus, tokens});
  all.push_back({1, 256, 40, Gate::softplus, 100});
  all.push_back({1, 96, 24, Gate::bounded, 70});  // no power of two: never on tiles
  all.push_back({1, 128, 64, Gate::still, 192, 0.98, true});
  all.push_back({2, 32, 12, Gate::bounded, 100, 0, false, 3, 2});
  all.push_back({2, 8, 12, Gate::bounded, 33, 0, false, 3, 1});
  all.push_back({2, 8, 12, Gate::still, 20, 0, false, 1});
  all.push_back({2, 12, 8, Gate::softplus, 18, 0, false, 0, 2});
  all.push_back({1, 12, 8, Gate::softplus, 18, 0, false, 0, 1});
  return all;
}

struct AttentionCase {
  int heads, latent, rope;
  int context;  // position of the last token + 1
  int tokens;   // of the step, at the end of the context
};
inline std::ostream& operator<<(std::ostream& out, const AttentionCase& c) {
  return out << "heads " << c.heads << " latent " << c.latent << " rope " << c.rope << " context "
             << c.context << " tokens " << c.tokens;
}
inline std::vector<AttentionCase> attention_cases() {
  return {{3, 20, 4, 1, 1},   {3, 20, 4, 70, 70},   {3, 20, 4, 130, 5},  {96, 40, 8, 129, 3},
          {96, 40, 8, 70, 7}, {5, 48, 16, 200, 17}, {64, 512, 0, 65, 2}, {16, 512, 64, 140, 4},
          {1, 32, 0, 64, 64}, {130, 24, 8, 66, 6},
          // rows of several segments: short, long, of many heads; neighbours cut at different keys
          {3, 20, 4, 1300, 4}, {8, 40, 8, 9000, 2}, {40, 24, 8, 2100, 3}, {2, 16, 0, 8220, 60}};
}

struct IndexCase {
  int heads, dim, topk, pool;
  int context, tokens;
};
inline std::ostream& operator<<(std::ostream& out, const IndexCase& c) {
  return out << "heads " << c.heads << " dim " << c.dim << " topk " << c.topk << " pool " << c.pool
             << " context " << c.context << " tokens " << c.tokens;
}
inline std::vector<IndexCase> index_cases() {
  return {{2, 8, 3, 1, 12, 12},      {3, 40, 16, 1, 200, 37},     {1, 32, 20, 1, 130, 130},
          {8, 128, 32, 1, 300, 70},  {16, 64, 48, 1, 257, 33},    {12, 32, 16, 1, 100, 35},
          {32, 128, 64, 1, 300, 9},  {64, 128, 16, 1, 150, 3},    {2, 8, 8, 4, 203, 203},
          {32, 128, 64, 4, 700, 21}, {5, 24, 12, 4, 90, 90},      {2, 8, 16, 8, 150, 40},
          {130, 16, 7, 1, 40, 5},    {32, 128, 2048, 1, 2051, 5}, {32, 128, 2048, 4, 2056, 9}};
}

struct RowsCase {
  int width;
  int parts;  // sources of a mix, streams of hyper-connections
  int tokens;
};

struct MoeCase {
  WeightFormat format;
  int tokens, experts, top_k, width, intermediate;
  ActParams act = {};
  int favourite = -1;  // all tokens go here first
};
inline std::ostream& operator<<(std::ostream& out, const MoeCase& c) {
  return out << format_name(c.format) << " tokens " << c.tokens << " experts " << c.experts << " top_k " << c.top_k
             << " width " << c.width << " intermediate " << c.intermediate << ' ' << name(c.act.kind)
             << " favourite " << c.favourite;
}
inline std::vector<MoeCase> moe_cases() {
  std::vector<MoeCase> all;
  for (const WeightFormat format : kFormats) {
    all.push_back({format, 1, 8, 2, 45, 32});
    all.push_back({format, 19, 40, 3, 33, 64, kActs[1]});  // more experts than rows reach
    all.push_back(
        {format, 70, 6, 1, 64, 32, kActs[2], 4});  // one expert gets all 70 rows: more than one gather
    all.push_back({format, 33, 5, 4, 130, 96, kActs[3], 0});
  }
  return all;
}

// real-glm5-next and real-kimi-k31 (latent MoE over the hidden size), 16 experts kept.
inline std::vector<MoeCase> real_moe_cases() {
  std::vector<MoeCase> all;
  for (const int tokens : {1, 16, 64, 512}) {
    all.push_back({WeightFormat::bf16, tokens, 16, 4, 4096, 2048, {Act::swiglu_clamped, 10, 0, 0}});
    all.push_back({WeightFormat::e4m3, tokens, 16, 4, 4096, 2048, {Act::swiglu_clamped, 10, 0, 0}});
    all.push_back({WeightFormat::mxfp4, tokens, 16, 4, 7168, 3072, {Act::situ, 0, 4, 25}});
  }
  return all;
}

}  // namespace weft::cases
