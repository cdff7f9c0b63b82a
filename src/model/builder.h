// Builds a graph: every call names the weights it needs, and appends the kernels that use them. The sum of these calls
// is the only list of weights, cache rows and state a model has; loading, planning and running all read it.
//
// A tensor that is missing, or has another shape or dtype than the call says, is an Error naming it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/executor.h"
#include "graph/graph.h"
#include "kernels/kernels.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/packing.h"
#include "model/tier.h"
#include "model/weights.h"

namespace weft {

// How MLA layers compute prompts. automatic: expanded below the position where it stops paying, absorbed beyond.
enum class MlaForm : uint8_t { automatic, absorbed, expanded };

// How Attention Residuals are mixed: at every site from all finished blocks, or in two stages, of which the first reads
// them once for several sites. automatic: what was measured to be faster for so many blocks and sites. Always the same bits.
enum class MixForm : uint8_t { automatic, one_stage, two_stages };

// Which tokens DSA layers attend to: those the indexer selects; all of them; or the most recent ones, as many as the
// indexer would select. The last two leave the indexer out: they say what a selection costs and what it is worth.
enum class DsaMode : uint8_t { sparse, dense, recent };

struct BuildOptions {
  int max_tokens = 512;   // of one step
  int max_logits = 16;    // rows of one step whose logits are wanted
  bool trace = false;     // keep what Builder::trace() names
  MlaForm mla = MlaForm::automatic;
  ExecMode exec = ExecMode::super;
  DsaMode dsa = DsaMode::sparse;
  Tier tier;
  IndexFormat index_cache = IndexFormat::operand;
  LatentFormat latent_cache = LatentFormat::operand;
  MixForm mix = MixForm::automatic;
  bool poison = false;    // tests: the values of a step start as NaN, so that what reads the unwritten shows
};

// The same rows as f32 and as operand; equal on ISAs whose operands are f32.
struct Normed {
  Val f32, op;
};

// Where a sub-layer's last product goes.
struct Sink {
  Val out;           // f32
  bool add = false;  // onto what is there
};

// Named parts of a matrix packed side by side, each starting at a multiple of 16 columns (or of more, see matrices).
struct Parts {
  std::vector<int> matrices;   // of Weights; one per run of parts with the same stored format
  std::vector<int> columns;    // first column of each matrix in the output
  std::vector<int> offset;     // first column of each part
  int width = 0;               // of all
};

// What lives outside the step: bound by the model before the first run.
struct CacheLayout {
  std::vector<size_t> slab_bytes;  // per page
  std::vector<Slot> slabs;
  size_t slot_bytes = 0;           // of one sequence's state
  std::vector<std::pair<Slot, size_t>> states;  // and its offset in the slot
  bool recurrent = false;          // some state cannot be cut at any position
  size_t latent_bytes = 0, index_bytes = 0;     // per page, for `weft plan`
  size_t kda_bytes = 0;                         // per sequence
};

// A DSA layer with a selection of its own, for what compares selections with attention: its latent rows are those of
// `slab`, its queries are traced as "layer.N.query" (operand rows, head h at h * row_elements: latent | rope).
struct SelectingLayer {
  int layer = 0, slab = 0, row_elements = 0;
  LatentFormat format = LatentFormat::operand;
};

struct TraceBuffer {
  Slot slot;
  int width = 0;
  Rows rows = Rows::tokens;
};

// What MLA takes from a head's rows of kv_b_proj (dsa.md 1.2, 1.3): W_UK^T [R, nope] to absorb queries, W_UK [nope, R] and
// W_UV [v, R] to expand keys and values.
enum class HeadWeights : uint8_t { absorb, keys, values };

class Builder {
 public:
  Builder(const KernelTable& kernels, const ModelConfig& config, const Checkpoint& checkpoint, BuildOptions options);

  // --- tensors ---
  // error: absent under any of the names; the first one is the name the message gives.
  const TensorInfo& tensor(const std::vector<std::string>& names, std::vector<int64_t> shape);
  const TensorInfo* find(const std::string& name) const;  // prefix added; null when absent
  StoredMatrix stored(const std::string& name, int64_t rows, int64_t columns);  // ".weight", its scales, its tier

  struct Part {
    std::string name;  // without ".weight"
    int rows;
  };
  // align: of the parts' first columns, a multiple of 16. A part that is itself the input of a product starts and ends at
  // multiples of 32: products read whole steps of k, and zero weights do not stop a NaN of what lies behind.
  Parts matrices(const std::string& label, const std::vector<Part>& parts, int k, int align = kPanel);
  int head_matrix();  // lm_head, or the embedding when tied
  int pair_matrix(const std::string& label, const std::string& gate, const std::string& up, int rows, int k);
  // copies of (gate, up) pairs or of plain matrices, one per expert
  int expert_pairs(const std::string& label, const std::vector<std::pair<std::string, std::string>>& names, int rows, int k);
  int experts(const std::string& label, const std::vector<std::string>& names, int rows, int k);
  int head_weights(const std::string& name, const MlaSpec& mla, HeadWeights which);  // of kv_b_proj, a copy per head
  Slot vector(const std::string& label, size_t count, std::vector<const TensorInfo*> sources,
              std::function<void(float*)> fill);
  Slot norm_weight(const std::string& name, int width);  // ".weight" [width]

  // --- values ---
  Val f32_rows(const std::string& label, int width, Rows rows = Rows::tokens);
  Val op_rows(const std::string& label, int width, Rows rows = Rows::tokens);
  // Rows a norm writes: operand, and f32 where wanted (the same rows on ISAs whose operands are f32).
  Normed normed_rows(const std::string& label, int width, bool want_f32, Rows rows = Rows::tokens);
  Val expert_rows(const std::string& label, int width, bool op);  // one row per (token, choice)
  Val raw_rows(const std::string& label, int width);              // 4-byte elements, dense rows
  static Val view(const Val& v, int offset, int width);

  // --- kernels ---
  Normed norm(const std::string& name, const Val& x, int width, float eps, int site, bool want_f32, Rows rows = Rows::tokens);
  // out = a W^T for a whole set of parts; f32 or operand rows.
  Val linear(const Normed& a, const Parts& parts, const std::string& label, bool op_out);
  void product(const std::string& label, const Val& a, bool precise, int matrix, Epilogue epilogue, const Val& out,
               Rows rows = Rows::tokens,
               int slack = 0);  // slack: operand columns beyond the output that are cleared too
  void into(const Sink& sink, const std::string& label, const Val& a, const Parts& parts);

  void trace(const std::string& name, const Val& x, int width, Rows rows = Rows::tokens);  // operand rows too

  int add_slab(const std::string& label, size_t bytes_per_page);
  Slot slab(int i) const { return caches.slabs[i]; }
  Slot add_state(const std::string& label, size_t bytes);  // of the slot, 64-byte aligned

  Graph graph;
  Weights weights;
  CacheLayout caches;
  std::map<std::string, TraceBuffer> traces;
  Slot logits;
  int logits_ld = 0;
  int moe_layers = 0, dsa_layers = 0;  // counted while building; dsa_layers: those that select
  std::vector<SelectingLayer> selecting;
  int selection_width = 0;

  const KernelTable& kernels;
  const ModelConfig& config;
  const BuildOptions options;
  ActParams activation() const;
  int op_bytes() const { return kernels.operand_bytes(); }
  int row_capacity(Rows rows) const;

  // Points a kernel that ends in a norm at its rows.
  template <class Make>
  void write_normed(Make& node, const Normed& out) {
    node->ld_op = out.op.ld;
    node.at(node->out_op, out.op);
    if (!kernels.bf16_operands) return;
    node->ld_f32 = out.f32.ld;
    node.at(node->out_f32, out.f32);
  }

 private:
  StoredMatrix as_stored(const std::string& name, int64_t rows, int64_t columns);
  int add_matrix(Matrix matrix);
  Val make_rows(const std::string& label, int rows, int width, int element_bytes);
  const Checkpoint& checkpoint_;
  std::string prefix_;
};

}  // namespace weft
