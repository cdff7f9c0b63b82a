// Checkpoints of random weights in the released format: same tensor names, shapes, dtypes and config keys, at
// any size. For benches, plans and tests; a loader cannot tell them from a download.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/json.h"
#include "model/safetensors.h"

namespace weft {

// fp8: E4M3 with 128 x 128 scales, on the matrices where the release has it. mxfp4: the routed experts of
// Kimi-K3.
enum class SynthFormat : uint8_t { bf16, fp8, mxfp4 };

// Sizes. 0 where a family's defaults have 0: the family has no such thing.
struct SynthSpec {
  std::string family;  // as in Arch::family
  SynthFormat format = SynthFormat::bf16;
  uint64_t seed = 0;
  size_t shard_bytes = size_t{2} << 30;  // a file is closed at the first tensor beyond
  double routed_scale = 2.5;

  int vocab = 32000, hidden = 1024, layers = 8, max_positions = 1048576;
  int full_every =
      0;  // of so many layers the last one is MLA, the others KDA; Kimi's last layer is MLA in any case
  int heads = 8, kda_heads = 0 /* as heads */, kda_head_dim = 0;
  int q_lora = 0, kv_lora = 512, nope = 128, rope = 64, v = 128;
  int index_heads = 0, index_dim = 0, index_topk = 0, index_pool = 0;
  int index_every = 0;  // one of so many DSA layers owns an indexer, the others share its choice
  int dense_layers = 1, intermediate = 2816;
  int experts = 32, top_k = 4, groups = 1, top_groups = 1;
  int expert_width = 512, shared_experts = 1, latent = 0;
  int attn_res_block = 0, hc_streams = 0;

  bool full(int layer) const;  // MLA, else KDA
  bool owns_indexer(int layer) const;
  bool kimi() const { return family.starts_with("kimi"); }
  bool k3() const { return family == "kimi_k3" || family == "kimi_k31"; }
  int linear_heads() const { return kda_heads ? kda_heads : heads; }
};

std::vector<std::string> synth_families();
std::vector<std::string> synth_presets();
// error (usage): unknown, listing what is known.
SynthSpec synth_defaults(const std::string& family);
SynthSpec synth_preset(const std::string& name);
SynthFormat synth_format(const std::string& name);

// error (usage): sizes that no loader takes (weft's own reader of the family judges the config), a format
// that the family is not released in.
void check_synth(const SynthSpec& spec);

// What fills a tensor. Codes and scales of one matrix are drawn under one name, so that they fit together.
enum class SynthFill : uint8_t { values, fp8_codes, fp8_scales, mxfp4_codes, mxfp4_scales };

struct SynthTensor {
  std::string name;
  std::string draw;  // what the draws are keyed by
  StoredDtype dtype = StoredDtype::bf16;
  std::vector<int64_t> shape;
  SynthFill fill = SynthFill::values;
  float mean = 0, std = 1;    // of the values, decoded
  bool power_of_two = false;  // fp8 scales

  size_t bytes() const;
};

// Layer by layer, so that a shard holds whole layers.
std::vector<SynthTensor> synth_tensors(const SynthSpec& spec);
Json synth_config(const SynthSpec& spec);
Json quantization_config(SynthFormat format);  // as the releases write it; bf16: null
// Values that a reader sees: scales are not counted, an MXFP4 byte is two.
size_t synth_parameters(const std::vector<SynthTensor>& tensors);

// A folder that is empty of models, with room for so many bytes; made if absent. error: it is neither.
void prepare_model_folder(const std::filesystem::path& folder, size_t bytes);

struct SynthReport {
  size_t bytes = 0, parameters = 0;
  int files = 0;
};

// Writes config.json (last, so that a folder without it is no model), model*.safetensors and, with several
// files, their index; copies the tokenizer's files from `tokenizer` unless empty. threads 0:
// default_threads(). The bytes depend on the spec alone. error: the folder already holds a model; the disk is
// too small, with both numbers; a tokenizer with ids beyond vocab.
SynthReport synthesize(const SynthSpec& spec, const std::string& directory, const std::string& tokenizer = "",
                       int threads = 0);

}  // namespace weft
