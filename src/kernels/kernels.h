// Every fused kernel: its arguments (a POD with the shape of each field), the step it works on, and the table that
// one ISA unit exports.
//
// A kernel never allocates, throws, logs, locks or asks what machine it is on. It runs `call.task` of `call.tasks`;
// how many tasks a step has is work.h's business. Values are rows of f32, or of the *operand type* of the ISA: what
// its matrix product consumes (bf16 on avx512 and amx, f32 on portable and avx2, which have no bf16 product).
//
// Rules every writer keeps:
//  * a buffer has its rows padded to 16: an AMX tile reads 16 rows whatever the step has;
//  * a row that a product reads, operand or f32, is zero from its width to the next multiple of 32: products run over
//    padded k, and zero weights do not stop a NaN.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/packed.h"

namespace weft {

inline constexpr int kPageTokens = 64;   // rows of a cache page, for every layer
inline constexpr int kKdaChunk = 16;     // tokens of one KDA chunk; cut at absolute positions. On tiles: a page
inline constexpr int kKeyBlock = 64;     // keys of one attention block; cut at absolute list positions
inline constexpr int kMaxHeadDim = 256;  // KDA key and value head dim, index head dim
inline constexpr int kMaxStreams = 4;    // hyper-connections
inline constexpr int kMaxExpertGroups = 256;

// Tokens of one sequence in this step: rows [begin, begin + length), positions from `position`.
struct Span {
  int32_t begin, length;
  int32_t position;    // of the first row
  int32_t table;       // row of block_table
  int32_t state_slot;  // of the state pool
};

// The only thing that changes between steps.
struct StepHeader {
  int32_t tokens = 0, spans = 0, logit_rows = 0;
  const int32_t* token = nullptr;        // [tokens] ids
  const int32_t* position = nullptr;     // [tokens] absolute, 0-based
  const int32_t* span_of = nullptr;      // [tokens]
  const Span* span = nullptr;            // [spans]
  const int32_t* block_table = nullptr;  // [tables][table_stride] page ids
  int32_t table_stride = 0;
  size_t state_stride = 0;               // bytes from one sequence's state slot to the next
  const int32_t* logit_row = nullptr;    // [logit_rows] rows whose logits are wanted
  int32_t* nonfinite = nullptr;          // [tokens] lowest norm site that saw a NaN or Inf; INT32_MAX = none
  // Discrete choices, for verification: forced ones replace the kernel's own, seen ones are written. Indexed by MoE
  // layer and by DSA layer in order; a null array or entry means no. Widths: top_k, and the kernel's list width.
  const int32_t* const* forced_experts = nullptr;
  const int32_t* const* forced_selection = nullptr;  // [tokens][width], -1 padded
  int32_t* const* seen_experts = nullptr;
  int32_t* const* seen_selection = nullptr;
};

struct Call {
  const StepHeader* step;
  int task, tasks;
  std::byte* scratch;  // of this thread, kScratchBytes, 64-byte aligned
};
inline constexpr size_t kScratchBytes = size_t{4} << 20;

// Which rows a row-wise kernel works on.
enum class Rows : uint8_t {
  tokens,
  logits,   // output row i reads input row logit_row[i]
  compact,  // logit_rows rows that were gathered before
};

struct EmbedArgs {
  const std::byte* table;  // [vocab, width] row-major, as stored
  uint8_t bf16;            // else f32
  int32_t width;
  int32_t copies;          // hyper-connections start with equal streams
  float* out;              // [tokens, copies * width]
  int32_t ld_out;
};

// y = x rsqrt(mean(x^2) + eps) w
struct NormArgs {
  const float* x;          // [rows, width]
  int32_t ld_x;
  const float* weight;     // [width]
  int32_t width;
  float eps;
  Rows rows;
  int32_t site;            // 2 layer (attention), 2 layer + 1 (ffn), 2 layers (final)
  float* out_f32;          // or null
  void* out_op;            // operand type, or null
  int32_t ld_f32, ld_op;
};

enum class Epilogue : uint8_t {
  store_f32,      // out f32 = acc
  add_f32,        // out f32 += acc
  store_op,       // out operand = acc
  activate,       // panels come as (gate, up) pairs; out operand = act(gate, up), half the columns
  gate_op,        // out operand = acc * sigmoid(gate)
};

enum class Act : uint8_t { swiglu, swiglu_clamped, situ };

struct ActParams {
  Act kind = Act::swiglu;
  float limit = 0;                  // swiglu_clamped
  float beta = 0, linear_beta = 0;  // situ; linear_beta <= 0: u unchanged
};

// out[r, g, :] = epilogue( a[r, g, :] W_g^T ), g < groups: groups are MLA heads, W_g consecutive packed weights.
struct GemmArgs {
  const void* a;           // [rows, ld_a]; f32 when `precise`, else operand type
  int32_t ld_a;
  int32_t a_group;         // elements between the inputs of two groups
  uint8_t precise;         // f32 activations and products whatever the ISA: routers, indexer weights, mHC maps
  Epilogue epilogue;
  Rows rows;               // tokens or compact
  int32_t groups;
  PackedWeight w;          // of group 0; the others follow it in codes and scales
  void* out;               // [rows, ld_out]
  int32_t ld_out;
  int32_t out_group;
  int32_t out_pad;         // operand columns to clear behind the last group's output
  const float* gate;       // gate_op: [rows, ld_gate], column as out
  int32_t ld_gate;
  ActParams act;
};

// One KDA layer between its projections (kda.md 1.2, 2.1): conv + SiLU + L2 + gate + recurrence + gated norm.
struct KdaArgs {
  const void* qkv;         // operand [tokens, ld_qkv]: q at 0, k at k_offset, v at v_offset; each [heads, dim]
  int32_t ld_qkv, k_offset, v_offset;
  const void* decay;       // operand [tokens, ld_decay]: [heads, K] before bias and gate
  int32_t ld_decay;
  const void* beta;        // operand [tokens, ld_beta]: [heads] before the sigmoid
  int32_t ld_beta;
  const void* gate;        // operand [tokens, ld_gate]: [heads, V] before the sigmoid
  int32_t ld_gate;
  const float* conv;       // [taps][conv_stride]: q | k | v channels, oldest tap first
  int32_t conv_stride;
  const float* slope;      // [heads] exp(A_log)
  const float* bias;       // [heads, K] dt_bias
  const float* norm;       // [V] o_norm
  std::byte* state;        // slot 0 of this layer: f32 S [heads, K, v_stride], then the conv tail [taps - 1][conv_stride]
  size_t tail_offset;      // bytes from S to the tail
  int32_t heads, key_dim, value_dim, v_stride, taps;  // taps <= 4
  uint8_t bounded;
  float lower_bound;
  float norm_eps;
  void* out;               // operand [tokens, ld_out]: [heads, V]
  int32_t ld_out;
};

// Cosines, then sines, of every position of the step: [tokens, 2, pairs]
struct RopeTableArgs {
  const double* inv_freq;  // [pairs]
  int32_t pairs;
  float scale;
  float* out;
};

enum class RopeMode : uint8_t { none, interleaved, half_split };

// Rotates `dims` leading dims of each head of x in place (dsa.md 2.2: indexer queries), or copies and rotates them
// into another row (MLA's q_pe beside the absorbed query).
struct RopeArgs {
  const void* x;           // operand [tokens, ld_x], head h at h * x_head
  int32_t ld_x, x_head;
  void* out;               // operand [tokens, ld_out], head h at h * out_head
  int32_t ld_out, out_head;
  int32_t heads, dims;
  RopeMode mode;
  const float* table;      // of RopeTableArgs
};

// Writes one latent row per token: RMSNorm(c) | rope(k_pe)   (dsa.md 1.1)
struct LatentArgs {
  const float* kv;         // [tokens, ld_kv]: latent R, then k_pe
  int32_t ld_kv;
  const float* norm;       // [R]
  float eps;
  int32_t latent, rope;
  RopeMode mode;
  const float* table;
  std::byte* slab;         // rows of packed.h: LatentFormat, page stride page_bytes
  size_t page_bytes;
  LatentFormat format;
};

// LayerNorm + rope of the index key, pooled where pool > 1 (dsa.md 2.1, 3.2), written in panels of 16 keys.
struct IndexKeyArgs {
  const float* key;        // [tokens, ld_key]
  int32_t ld_key;
  const float* pool_gate;  // [tokens, ld_gate] or null
  int32_t ld_gate;
  const float* ape;        // [pool, dim] or null
  const float* norm;       // [dim]
  const float* norm_bias;  // [dim] (zeros when the file has none)
  float eps;
  int32_t dim, rope, pool;
  RopeMode mode;
  const float* table;
  std::byte* slab;
  size_t page_bytes;
  std::byte* ring;         // slot 0: f32 [pool][2][dim] keys and gates of the open pool; pool == 1: null
  IndexFormat format;
};

// Lightning indexer: score + head weight + streaming exact top-k over the paged keys (dsa.md 2.1, 2.6, 3.3).
// A row lists token positions ascending, count = min(topk, visible) (pool: 4 per pool plus the open tail), -1 behind.
struct IndexArgs {
  const void* q;           // operand [tokens, ld_q]: [heads, dim]
  int32_t ld_q;
  const float* weight;     // [tokens, ld_weight]: [heads]
  int32_t ld_weight;
  float scale;             // heads^-0.5 dim^-0.5
  int32_t heads, dim, topk, pool;
  const std::byte* slab;
  size_t page_bytes;
  int32_t layer;           // of StepHeader::forced_selection
  int32_t* out;            // [tokens, width]
  int32_t* count;          // [tokens]
  int32_t width;           // topk + pool - 1
  IndexFormat format;      // the queries are quantised as the keys are
  // Few tokens: the keys of each are cut in parts, whose best are merged by IndexMergeArgs (index_plan.h).
  float* part_score;       // [kIndexLists][topk / pool]
  int32_t* part_index;
  int32_t* part_count;     // [kIndexLists]; -1 in a row's first: the row's list is written
};

// Merges the parts of each row that was cut, by the same order.
struct IndexMergeArgs {
  IndexArgs index;
};

// The same unfused, for `weft bench kernels --compare`: products to memory, head sums to memory, selection. Operand keys,
// pool 1.
struct IndexPassesArgs {
  IndexArgs index;
  float* product;          // [tasks][heads padded to 16][ld]
  float* score;            // [tasks][ld]
  int32_t ld;              // keys, padded to 64
};

// The list of IndexArgs without scores: the `width` most recent tokens.
struct RecentArgs {
  int32_t layer;           // of StepHeader::forced_selection
  int32_t* out;            // [tokens, width]
  int32_t* count;          // [tokens]
  int32_t width;
};

// Absorbed MLA over the paged latent rows: dense when the list is the whole prefix, gathered by index otherwise
// (dsa.md 1.3, 4.1). Online softmax over blocks of the list in ascending order.
struct AttentionArgs {
  const void* q;           // operand [tokens, ld_q]: head h at h * q_head: [R | rope]
  int32_t ld_q, q_head;
  int32_t heads, latent, rope;
  float scale;
  const std::byte* slab;
  size_t page_bytes;
  LatentFormat format;
  const int32_t* list;     // [tokens, width] or null: dense
  const int32_t* count;    // [tokens]
  int32_t width;
  int32_t expand_below;    // rows that ExpandedArgs takes are left alone
  void* out;               // operand [tokens, ld_out]: head h at h * out_head: [R]
  int32_t ld_out, out_head;
  // Few tokens: the segments of a row are tasks of their own, folded by AttentionMergeArgs (attention_plan.h). Null:
  // a task takes whole rows.
  float* part_out;         // [kAttentionParts][heads][R padded to 16]
  float* part_top;         // [kAttentionParts][heads]
  float* part_sum;
};

// Folds the segments of rows that were cut.
struct AttentionMergeArgs {
  AttentionArgs attention;
};

// Expanded MLA (dsa.md 1.2) for prefill: keys and values of one head are rebuilt from the latent rows block by block,
// once for all rows of a span, and the selection is a mask. 2 to 3.4 times fewer flops per pair than the absorbed form,
// for 2 R (nope + v) flops per key and span.
// A row is taken iff its aligned block of 64 positions lies in its span and below expand_below: a matter of the row
// alone, however the prompt is cut at multiples of 64.
struct ExpandedArgs {
  const void* q;           // operand [tokens, ld_q]: head h at h * q_head: nope, then unrotated rope
  int32_t ld_q, q_head;
  const void* q_pe;        // operand [tokens, ld_pe]: head h at h * pe_head: rotated rope dims
  int32_t ld_pe, pe_head;
  PackedWeight key, value; // of head 0: W_UK [nope, R], W_UV [v, R]; the other heads follow
  int32_t heads, latent, nope, rope, v;
  float scale;
  const std::byte* slab;
  size_t page_bytes;
  LatentFormat format;
  const int32_t* list;     // as AttentionArgs
  const int32_t* count;
  int32_t width;
  int32_t expand_below;    // a multiple of 64
  const float* gate;       // [tokens, ld_gate] or null: out *= sigmoid(gate)
  int32_t ld_gate;
  void* out;               // operand [tokens, ld_out]: head h at h * v
  int32_t ld_out;
};

inline constexpr int kMaxSources = 64;
inline constexpr int kMaxBankSites = 12;  // 24 of one block are no faster and take twice the memory

// Attention Residual mix and the RMSNorm behind it (kimi.md 6.2): the finished blocks, then the partial sum. With
// `bank` the partial sum alone, and what mix_bank made of the blocks: the same bits.
struct MixArgs {
  const float* source[kMaxSources];  // each [tokens, width]
  int32_t sources, ld;
  const float* bank;       // rows of mix_bank for this sub-layer, or null
  int32_t ld_bank;
  const float* query;      // [width] res_norm * res_proj
  const float* norm;       // [width]
  float mix_eps, eps;
  int32_t width;
  Rows rows;
  int32_t site;
  float* out_mix;          // the mix before the norm, or null
  float* out_f32;
  void* out_op;
  int32_t ld_f32, ld_op;
};

// First stage of the mixes of several sub-layers with the same finished blocks (kimi.md 6.3): every block is read once.
struct MixBankArgs {
  const float* source[kMaxSources];    // each [tokens, width]
  int32_t sources, ld;
  const float* query[kMaxBankSites];   // as MixArgs
  int32_t sites;
  float mix_eps;
  int32_t width;
  float* out;              // [tokens, ld_out], 64-byte aligned: sub-layer j at j * row
  int32_t ld_out, row;     // multiples of 16; row: the sum in `width` (padded to 16), then top and sum of the softmax
};
// Into how many units a token's sub-layers are cut: of few tokens they are tasks, else each would read the blocks again.
inline int mix_bank_cut(const MixBankArgs& m, int tokens) { return tokens < 16 ? m.sites : 1; }

// Hyper-connections (glm5_next.md 3.1): u = sum pre_i X_i, normed; post and C kept for hc_post.
struct HcPreArgs {
  const float* x;          // [tokens, streams * width]
  int32_t ld_x;
  const float* map;        // [tokens, ld_map]: fn z, streams (2 + streams) values
  int32_t ld_map;
  const float* scale;      // [3]
  const float* base;       // [streams (2 + streams)]
  const float* norm;       // [width]
  int32_t streams, width, iterations;
  float eps, hc_eps;
  int32_t site;
  float* keep;             // [tokens, 32]: post at 0, C at 8
  float* out_f32;
  void* out_op;
  int32_t ld_f32, ld_op;
};

// X_i = post_i y + sum_a C[a][i] X_a, in place.
struct HcPostArgs {
  float* x;
  int32_t ld_x;
  const float* y;          // [tokens, width]
  int32_t ld_y;
  const float* keep;
  int32_t streams, width;
};

// out = mean of the streams
struct HcEndArgs {
  const float* x;
  int32_t ld_x;
  int32_t streams, width;
  Rows rows;
  float* out;
  int32_t ld_out;
};

// Sigmoid router with groups (kimi.md 5.2, glm5_next.md 6). Ties: lower expert first.
struct RouteArgs {
  const float* logits;     // [tokens, ld]
  int32_t ld;
  const float* bias;       // [experts]
  int32_t experts, top_k, groups, top_groups;
  uint8_t renormalize;
  float scale;
  int32_t layer;           // of StepHeader::forced_experts
  int32_t* expert;         // [tokens, top_k] ascending
  float* weight;           // [tokens, top_k]
};

// Rows of each expert: a stable counting sort.
struct ExpertSortArgs {
  const int32_t* expert;   // [tokens, top_k]
  int32_t experts, top_k;
  int32_t* active;         // [0] number of experts with rows, then their ids [experts]
  int32_t* start;          // [experts + 1] first slot of an expert
  int32_t* slot_token;     // [tokens * top_k]
  int32_t* slot_of;        // [tokens * top_k] slot of (token, choice)
  int32_t* progress;       // [2 * experts + 1] cleared: what tasks of ExpertsArgs have claimed and done
};

// h[slot] = act(x W1, x W3), y[slot] = h[slot] W2: `up` holds (gate, up) panel pairs of each expert.
struct ExpertsArgs {
  const void* x;           // operand [tokens, ld_x]
  int32_t ld_x;
  PackedWeight up, down;   // of expert 0: up.n = 2 * intermediate padded
  size_t up_codes, up_scales, down_codes, down_scales;  // bytes between experts
  const int32_t* active;
  const int32_t* start;
  const int32_t* slot_token;
  int32_t* progress;       // of ExpertSortArgs
  int32_t experts, top_k, intermediate, width;
  ActParams act;
  void* h;                 // operand [tokens * top_k, ld_h]
  int32_t ld_h;
  float* y;                // [tokens * top_k, ld_y]
  int32_t ld_y;
};

// out[t] (+)= sum_j weight[t, j] y[slot_of(t, j)], in the order of j
struct CombineArgs {
  const float* y;
  int32_t ld_y;
  const float* weight;
  const int32_t* slot_of;
  int32_t top_k, width;
  uint8_t add;
  float* out;
  int32_t ld_out;
};

// Copies rows into a buffer that outlives the step's arena (traces, logits of chosen rows).
struct CopyArgs {
  const float* x;
  int32_t ld_x, width;
  Rows rows;
  float* out;
  int32_t ld_out;
};

// What a machine can do at most (`weft bench machine`): not part of any step.
enum class Probe : uint8_t {
  product,       // multiply and add in registers, as the ISA's matrix product does it: 2^20 operations a round and task
  product_int8,  // the same with int8 operands, where the ISA has such a product
  fma,           // f32, likewise
  read, write,   // each task passes over its part of `bytes` once a round
};
struct ProbeArgs {
  Probe kind;
  std::byte* data;         // [bytes] 64-byte aligned random values; products: 4 KB
  size_t bytes;
  int32_t rounds;
  float* sink;             // [tasks, 16]
};
inline constexpr double kProbeOperations = 1 << 20;

template <class Args>
using KernelFn = void (*)(const Args&, const Call&);

struct KernelTable {
  const char* isa;
  bool bf16_operands;          // the operand type; else f32
  bool int8_product;           // int8 operands multiply faster than bf16 ones
  void (*thread_init)();       // once per thread before any kernel: AMX palette; may be null
  KernelFn<EmbedArgs> embed;
  KernelFn<NormArgs> norm;
  KernelFn<GemmArgs> gemm;
  KernelFn<KdaArgs> kda;
  KernelFn<RopeTableArgs> rope_table;
  KernelFn<RopeArgs> rope;
  KernelFn<LatentArgs> latent;
  KernelFn<IndexKeyArgs> index_key;
  KernelFn<IndexArgs> index;
  KernelFn<IndexMergeArgs> index_merge;
  KernelFn<IndexPassesArgs> index_passes;  // of benchmarks only
  KernelFn<RecentArgs> recent;
  KernelFn<AttentionArgs> attention;
  KernelFn<AttentionMergeArgs> attention_merge;
  KernelFn<ExpandedArgs> attention_expanded;
  KernelFn<MixArgs> mix;
  KernelFn<MixBankArgs> mix_bank;
  KernelFn<HcPreArgs> hc_pre;
  KernelFn<HcPostArgs> hc_post;
  KernelFn<HcEndArgs> hc_end;
  KernelFn<RouteArgs> route;
  KernelFn<ExpertSortArgs> expert_sort;
  KernelFn<ExpertsArgs> experts;
  KernelFn<CombineArgs> combine;
  KernelFn<CopyArgs> copy;
  KernelFn<ProbeArgs> probe;

  constexpr int operand_bytes() const { return bf16_operands ? 2 : 4; }
};

}  // namespace weft
